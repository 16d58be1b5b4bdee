"""The page: one run or several side by side, as one HTML file without script and without external requests.

Whatever comes from the log is escaped where it enters the page: run names and rejection reasons are not trusted.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from common.errors import RunFolderError
from server.runfolder import RunFolder
from simulations.report import words
from simulations.report.charts import Chart, charts
from simulations.report.style import PAGE_STYLE
from simulations.report.summary import NOT_PRIVATE, RoundSummary, RunSummary, load_run
from simulations.report.svg import colour_class, legend_list

_MOST_SITES = 50
_MOST_REJECTIONS = 200
_LONGEST_REASON = 300


def write_report(folders: Sequence[Path], destination: Path) -> Path:
    """Write the report of one run, or the comparison of several, and return where it is."""
    if not folders:
        raise RunFolderError("expected at least one run folder, such as runs/<name>")
    runs = _distinct([load_run(folder) for folder in folders])
    page = _single_page(runs[0]) if len(runs) == 1 else _comparison_page(runs)
    destination.parent.mkdir(parents=True, exist_ok=True)
    # A log may hold half a surrogate pair, which is JSON but not UTF-8.
    destination.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return destination


def _distinct(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Add the folder to names that occur twice."""
    count = Counter(run.name for run in runs)
    return [run if count[run.name] == 1 else replace(run, name=f"{run.name} in {run.folder}") for run in runs]


def _single_page(run: RunSummary) -> str:
    body = [
        f'<div class="tiles">{_tiles(run)}</div>',
        section("Privacy", _privacy([run])),
        f'<div class="charts">{_figures([run])}</div>',
        section("Sites", _site_table(run)),
        section("Rejections", _rejection_table(run)),
        details("Full configuration", _config_table(run)),
    ]
    return _page([run], "Run report", run.name, words.headline(run), "".join(body))


def _comparison_page(runs: Sequence[RunSummary]) -> str:
    each = [details(run.label, _site_table(run) + _rejection_table(run) + _config_table(run)) for run in runs]
    body = [
        section("The runs side by side", _run_table(runs)),
        f'<div class="charts">{_figures(runs)}</div>',
        section("What differs in the configuration", _difference_table(runs)),
        section("Privacy", _privacy(runs)),
        section("Sites, rejections and full configuration", "".join(each)),
    ]
    return _page(runs, "Comparison", f"{len(runs)} runs compared", words.comparison_headline(runs), "".join(body))


def _badge(runs: Sequence[RunSummary]) -> str:
    return f' <span class="badge alert">{words.warning(runs)}</span>' if words.warning(runs) else ""


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
            _tile(run, "Total density", density, f"of {run.parameters:,} parameters per upload", run.total_density),
            _tile(run, "Time", words.duration(run.seconds), f"{run.progress}, {run.sites} sites", None),
        ]
    )


def _traffic_tile(run: RunSummary, label: str, cost: int, dense: int) -> str:
    compared = f"{words.against_dense(cost, dense)} ({words.in_bytes(dense)})" if cost else "nothing sent yet"
    return _tile(run, label, words.in_bytes(cost), compared, cost / dense if dense else None)


def _tile(run: RunSummary, label: str, figure: str, note: str, share: float | None) -> str:
    width = 0.0 if share is None else 100 * min(max(share, 0.0), 1.0)
    meter = "" if share is None else f'<div class="meter" aria-hidden="true"><i style="width:{width:.1f}%"></i></div>'
    return (
        f'<div class="tile"><h2>{escape(label)}{_badge([run])}</h2><p class="figure">{escape(figure)}</p>{meter}'
        f"<p>{escape(note)}</p></div>"
    )


def _privacy(runs: Sequence[RunSummary]) -> str:
    public = [run for run in runs if not run.private]
    private = [run for run in runs if run.private]
    names = "This run is not private" if len(runs) == 1 else f"Not private: {', '.join(run.name for run in public)}"
    lacks = "; or ".join(dict.fromkeys(words.lacks(run) for run in public))
    warning = (
        f'<p class="warning"><strong>{escape(names)}.</strong> There was {escape(lacks)}, '
        "so uploads and model may reveal records. The figures serve as a comparison only.</p>"
        if public
        else ""
    )
    statements = [_privacy_statement(run) for run in private]
    if not statements:
        return warning
    if len(runs) == 1:
        items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in statements[0].items())
        return f"<dl>{items}</dl>"
    keys = list(dict.fromkeys(key for statement in statements for key in statement))
    rows = [
        [run.label, *(statement.get(key, words.NONE) for key in keys)]
        for run, statement in zip(private, statements, strict=True)
    ]
    return warning + table(["run", *keys], rows, word_columns=1 + len(keys))


_SECRET = "this page and the run's log tell which sites were drawn in which round, which the guarantee needs hidden"


def _privacy_statement(run: RunSummary) -> dict[str, str]:
    noise = words.NONE if run.noise_multiplier is None else f"{run.noise_multiplier:.4g}"
    spent = f"{words.guarantee(run).removeprefix('at ')}, the largest over the sites, rounded up"
    unit = run.privacy_unit
    protected = (
        "each site as a whole, against everyone who sees the models; the server is trusted: it sees the uploads before "
        "it adds the noise"
        if unit == "client"
        else f"each {unit} of each site, against everyone who sees the uploads of that site, including the server"
    )
    audit = (
        {}
        if run.audit is None
        else {
            "Audit": f"an attack with {run.audit.canaries:,} canaries proved an epsilon of at least "
            f"{run.audit.lower_bound:.2f} of the {words.epsilon(run.audit.claimed_epsilon)} claimed (95 % confidence)"
        }
    )
    published = (
        {}
        if run.published_epsilon is None
        else {"Published accounting": f"the paper's own would say epsilon {run.published_epsilon:.4g}; not a guarantee"}
    )
    return {
        "Guarantee": f"{spent}; planned epsilon {words.epsilon(run.planned_epsilon)}",
        "Who is protected": protected,
        **({"Keep secret": _SECRET} if unit == "client" else {}),
        "Unit": f"one {unit}; whoever is behind several of them is protected less",
        "Neighbours": run.neighbours,
        "Method": words.method(run),
        "Accountant": f"{run.accountant}; noise multiplier {noise}",
        **published,
        **audit,
    }


def _run_table(runs: Sequence[RunSummary]) -> str:
    spending = ["progress", "accuracy", "epsilon", "delta", "noise"]
    traffic = ["uplink", "saving", "bits per value", "downlink", "density"]
    rows = [
        [
            run.label,
            run.progress,
            words.percent(run.accuracy),
            f"{words.spent(run)} of {words.epsilon(run.planned_epsilon)}" if run.private else NOT_PRIVATE,
            words.NONE if run.delta is None or not run.private else f"{run.delta:g}",
            words.NONE if run.noise_multiplier is None or not run.private else f"{run.noise_multiplier:.4g}",
            words.in_bytes(run.uplink),
            f"{run.dense_uplink / run.uplink:.3g}x" if run.uplink else words.NONE,
            words.bits(run.bits_per_value),
            words.in_bytes(run.downlink),
            words.percent(run.total_density),
            f"{run.sites}",
            words.duration(run.seconds),
        ]
        for run in runs
    ]
    return table(["run", *spending, *traffic, "sites", "time"], rows, word_columns=2, colours=range(1, len(runs) + 1))


def _difference_table(runs: Sequence[RunSummary]) -> str:
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "name")  # the name is in the head
    rows = [[key, *(run.config.get(key, words.NONE) for run in runs)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "<p>Nothing: all runs have the same configuration.</p>"
    return table(["key", *(run.label for run in runs)], differing, word_columns=len(runs) + 1)


def _site_table(run: RunSummary) -> str:
    if not run.site_summaries:
        return "<p>Sites are summed up when the run ends.</p>"
    rows = [
        [
            one.site,
            words.epsilon(one.epsilon),
            words.in_bytes(one.uplink),
            words.in_bytes(one.downlink),
            f"{one.admitted}",
            f"{one.rejected}",
        ]
        for one in run.site_summaries[:_MOST_SITES]
    ]
    epsilon = "epsilon" if run.private else f"epsilon ({NOT_PRIVATE})"
    head = ["site", epsilon, "uplink", "downlink", "admitted", "rejected"]
    return table(head, rows, word_columns=1) + _more(len(run.site_summaries), _MOST_SITES, "sites")


def _rejection_table(run: RunSummary) -> str:
    rows = [row for one in run.rounds for row in _rejection_rows(one)]
    if not rows:
        return "<p>No reply was rejected and no round was abandoned.</p>"
    shown = table(["round", "site", "reason"], rows[:_MOST_REJECTIONS], word_columns=3)
    return shown + _more(len(rows), _MOST_REJECTIONS, "rows")


def _rejection_rows(one: RoundSummary) -> Iterable[list[str]]:
    if one.abandoned:
        yield [f"{one.number}", "all", "round abandoned: too few replies, model unchanged"]
    for rejection in one.rejections:
        cut = rejection.reason[:_LONGEST_REASON]
        yield [f"{one.number}", rejection.site, cut if cut == rejection.reason else f"{cut} ..."]


def _config_table(run: RunSummary) -> str:
    return table(["key", "value"], [[key, value] for key, value in run.config.items()], word_columns=2)


def _more(count: int, shown: int, what: str) -> str:
    return f"<p>And {count - shown} more {what}.</p>" if count > shown else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, word_columns: int, colours: Sequence[int] = ()) -> str:
    """Return a table whose first ``word_columns`` columns hold words and the others figures; all cells are escaped.

    ``colours`` are those of the rows in the charts.
    """

    def cells(tag: str, texts: Sequence[str]) -> str:
        kinds = [""] * word_columns + [' class="number"'] * (len(texts) - word_columns)
        return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    swatches = [f' class="swatch {colour_class(colour)}"' for colour in colours] or [""] * len(rows)
    body = "".join(f"<tr{swatch}>{cells('td', row)}</tr>" for swatch, row in zip(swatches, rows, strict=True))
    whole = f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{whole}</div>'  # tabindex lets a keyboard scroll a wide table


def _figures(runs: Sequence[RunSummary]) -> str:
    return "".join(figure(chart, _badge(runs)) for chart in charts(runs))


def figure(chart: Chart, badge: str = "") -> str:
    """Return a chart with its title above and the key to its colours below; ``badge`` is HTML."""
    marked = "abandoned round" if 'class="mark"' in chart.drawing else ""
    caption = f"<figcaption><h2>{escape(chart.title)}{badge}</h2><p>{escape(chart.note)}</p></figcaption>"
    return f"<figure>{caption}{chart.drawing}{legend_list(chart.legend, marked)}</figure>"


def _unbroken(text: str) -> str:
    """Keep browsers from breaking 1e-05 after its minus sign."""
    return re.sub(r"\d+e-\d+", r"<span>\g<0></span>", text)


def section(title: str, body: str) -> str:
    """Return a card; ``body`` is HTML."""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'


def details(title: str, body: str) -> str:
    """Return a card that is folded until somebody opens it; ``body`` is HTML."""
    return f'<details class="card"><summary>{escape(title)}</summary>{body}</details>'


def _page(runs: Sequence[RunSummary], kind: str, name: str, headline: str, body: str) -> str:
    log = RunFolder(runs[0].folder).log.name
    unfinished = "" if all(run.finished for run in runs) else ' <span class="badge">unfinished</span>'
    origins = "; ".join(
        f"{run.name}: Fedsieve {run.version}, started {run.started:%Y-%m-%d %H:%M} UTC"
        + (f", resumed {run.resumed} times" if run.resumed else "")
        for run in runs
    )
    footer = f"{origins}. Made from {log} alone."
    return document(
        kind, name, headline, body, footer, warning=words.warning(runs), badges=f"{_badge(runs)}{unfinished}"
    )


def document(
    kind: str, name: str, headline: str, body: str, footer: str, *, warning: str = "", badges: str = ""
) -> str:
    """Return the whole page; ``body`` and ``badges`` are HTML, the other texts are escaped here."""
    title = f"{name} ({warning})" if warning else name
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} - Fedsieve</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{PAGE_STYLE}</style></head><body><main>'
        f'<header><p class="kind">Fedsieve {escape(kind.lower())}{badges}</p>'
        f"<h1><bdi>{escape(name)}</bdi></h1>"
        f'<p class="headline">{_unbroken(escape(headline))}.</p></header>\n{body}\n'
        f"<footer><p>{escape(footer)}</p></footer></main></body></html>\n"
    )
