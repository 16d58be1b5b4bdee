"""The page of one run, or of several side by side.

Whatever comes from the log is escaped where it enters the page: run names and rejection reasons are not trusted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from common.errors import RunFolderError
from server.runfolder import RunFolder
from simulations.report import tables, words
from simulations.report.charts import charts
from simulations.report.page import definitions, details, document, figure, section, table
from simulations.report.statement import in_plain_words, privacy_details
from simulations.report.summary import AUDIT_NAME, RunSummary, load_run


def write_report(folders: Sequence[Path], destination: Path) -> Path:
    """Write the report of one run, or the comparison of several, and return where it is."""
    if not folders:
        raise RunFolderError("expected at least one run folder, such as runs/<name>")
    page = report_page([load_run(folder) for folder in folders])
    destination.parent.mkdir(parents=True, exist_ok=True)
    # A log may hold half a surrogate pair, which is JSON but not UTF-8.
    destination.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return destination


def report_page(runs: Sequence[RunSummary], *, above: str = "", script: str = "") -> str:
    """Return the page of one run or several; ``above`` (HTML) and ``script`` make it one that updates itself."""
    if len(runs) == 1:
        kind, name, headline, body = "Run report", runs[0].name, words.headline(runs[0]), _single_body(runs[0])
    else:
        runs = _distinct(runs)
        kind, name, headline = "Comparison", f"{len(runs)} runs compared", words.comparison_headline(runs)
        body = _comparison_body(runs)
    sources = [RunFolder(runs[0].folder).log.name, *([AUDIT_NAME] if any(run.audit for run in runs) else [])]
    unfinished = "" if all(run.finished for run in runs) else ' <span class="badge">unfinished</span>'
    origins = "; ".join(
        f"{run.name}: Fedsieve {run.version}, started {run.started:%Y-%m-%d %H:%M} UTC"
        + (f", resumed {run.resumed} times" if run.resumed else "")
        for run in runs
    )
    return document(
        kind,
        name,
        headline,
        body,
        f"{origins}. Made from {' and '.join(sources)} alone.",
        warning=words.warning(runs),
        badges=f"{_badge(runs)}{unfinished}",
        above=above,
        script=script,
    )


def _distinct(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Add the folder to names that occur twice."""
    count = Counter(run.name for run in runs)
    return [run if count[run.name] == 1 else replace(run, name=f"{run.name} in {run.folder}") for run in runs]


def _single_body(run: RunSummary) -> str:
    return "".join(
        [
            f'<div class="tiles">{_tiles(run)}</div>',
            section("In plain words", _warning([run]) + definitions(in_plain_words(run))),
            f'<div class="charts">{_figures([run])}</div>',
            section("Where the bytes went", tables.part_table([run])),
            section("Privacy in detail", definitions(privacy_details(run))) if run.private else "",
            section("Sites", tables.site_table(run)),
            section("Rejections", tables.rejection_table(run)),
            details("Round by round", tables.round_table(run)),
            details("Full configuration", tables.config_table(run)),
        ]
    )


def _comparison_body(runs: Sequence[RunSummary]) -> str:
    each = [
        details(
            run.label,
            "<h3>Sites</h3>"
            + tables.site_table(run)
            + "<h3>Rejections</h3>"
            + tables.rejection_table(run)
            + "<h3>Round by round</h3>"
            + tables.round_table(run)
            + "<h3>Configuration</h3>"
            + tables.config_table(run),
        )
        for run in runs
    ]
    return "".join(
        [
            section("The runs side by side", tables.run_table(runs)),
            f'<div class="charts">{_figures(runs)}</div>',
            section("What differs in the configuration", tables.difference_table(runs)),
            section("Privacy", _warning(runs) + _privacy_table(runs)),
            section("Where the bytes went", tables.part_table(runs)),
            section("Sites, rejections, rounds and full configuration", "".join(each)),
        ]
    )


def _badge(runs: Sequence[RunSummary]) -> str:
    return f' <span class="badge alert">{words.warning(runs)}</span>' if words.warning(runs) else ""


def _warning(runs: Sequence[RunSummary]) -> str:
    public = [run for run in runs if not run.private]
    if not public:
        return ""
    names = "This run is not private" if len(runs) == 1 else f"Not private: {', '.join(run.name for run in public)}"
    lacks = "; or ".join(dict.fromkeys(words.lacks(run) for run in public))
    return (
        f'<p class="warning"><strong>{escape(names)}.</strong> There was {escape(lacks)}, so uploads and model may '
        "reveal records. The figures serve as a comparison only.</p>"
    )


def _privacy_table(runs: Sequence[RunSummary]) -> str:
    statements = [(run, dict(privacy_details(run))) for run in runs if run.private]
    keys = list(dict.fromkeys(key for _, statement in statements for key in statement))
    rows = [[run.label, *(statement.get(key, words.NONE) for key in keys)] for run, statement in statements]
    return table(["run", *keys], rows, word_columns=1 + len(keys)) if rows else ""


def _tiles(run: RunSummary) -> str:
    before = "" if run.initial_accuracy is None else f"{words.percent(run.initial_accuracy)} before training"
    density = words.percent(run.total_density)
    delta = "" if run.delta is None else f", delta {run.delta:g}"
    plan = f"of {words.epsilon(run.planned_epsilon)} planned{delta}" if run.private else words.lacks(run)
    spent = words.spent(run) if run.private else "unlimited"
    share = run.epsilon / run.planned_epsilon if run.private and run.epsilon and run.planned_epsilon else None
    return "".join(
        [
            _tile(run, "Test loss", words.loss(run.loss), f"{words.loss(run.initial_loss)} before training", None)
            if run.has_loss_alone
            else _tile(run, "Test accuracy", words.percent(run.accuracy), before, run.accuracy),
            _tile(run, "Epsilon spent", spent, plan, share),
            _traffic_tile(run, "Uplink", run.uplink, run.dense_uplink),
            _traffic_tile(run, "Downlink", run.downlink, run.dense_downlink),
            _tile(run, "Bits per value", words.bits(run.bits_per_value), words.bits_note(run), None),
            _tile(
                run,
                "Total density",
                density,
                f"of {run.parameters:,} parameters in an upload, on average",
                run.total_density,
            ),
        ]
    )


def _traffic_tile(run: RunSummary, label: str, cost: int, dense: int) -> str:
    compared = f"{words.against_dense(cost, dense)} ({words.in_bytes(dense)})" if cost else "nothing sent yet"
    return _tile(run, label, words.in_bytes(cost), compared, cost / dense if dense else None)


def _tile(run: RunSummary, label: str, shown: str, note: str, share: float | None) -> str:
    meter = ""
    if share is not None:
        width = 100 * min(max(share, 0.0), 1.0)
        meter = f'<div class="meter" aria-hidden="true"><i style="width:{width:.1f}%"></i></div>'
    return (
        f'<div class="tile"><h2>{escape(label)}{_badge([run])}</h2><p class="figure">{escape(shown)}</p>{meter}'
        f"<p>{escape(note)}</p></div>"
    )


def _figures(runs: Sequence[RunSummary]) -> str:
    return "".join(figure(chart, _badge(runs)) for chart in charts(runs))
