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
from simulations.report.summary import NOT_PRIVATE, RoundSummary, RunSummary, load_run
from simulations.report.svg import CHART_STYLE, colour_class, legend_list

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
        _section("Privacy", _privacy([run])),
        f'<div class="charts">{_figures([run])}</div>',
        _section("Sites", _site_table(run)),
        _section("Rejections", _rejection_table(run)),
        _details("Full configuration", _config_table(run)),
    ]
    return _page([run], "Run report", run.name, words.headline(run), "".join(body))


def _comparison_page(runs: Sequence[RunSummary]) -> str:
    each = [_details(run.label, _site_table(run) + _rejection_table(run) + _config_table(run)) for run in runs]
    body = [
        _section("The runs side by side", _run_table(runs)),
        f'<div class="charts">{_figures(runs)}</div>',
        _section("What differs in the configuration", _difference_table(runs)),
        _section("Privacy", _privacy(runs)),
        _section("Sites, rejections and full configuration", "".join(each)),
    ]
    return _page(runs, "Comparison", f"{len(runs)} runs compared", words.comparison_headline(runs), "".join(body))


def _badge(runs: Sequence[RunSummary]) -> str:
    return f' <span class="badge alert">{words.warning(runs)}</span>' if words.warning(runs) else ""


def _tiles(run: RunSummary) -> str:
    before = "" if run.initial_accuracy is None else f"{words.percent(run.initial_accuracy)} before training"
    density = words.percent(run.total_density)
    delta = "" if run.delta is None else f", delta {run.delta:g}"
    plan = f"of {words.epsilon(run.planned_epsilon)} planned{delta}" if run.private else "no clipping, no noise"
    spent = words.spent(run) if run.private else "unlimited"
    share = run.epsilon / run.planned_epsilon if run.private and run.epsilon and run.planned_epsilon else None
    return "".join(
        [
            _tile(run, "Test accuracy", words.percent(run.accuracy), before, run.accuracy),
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
    warning = (
        f'<p class="warning"><strong>{escape(names)}.</strong> Nothing was clipped and no noise was '
        "added, so uploads and model may reveal records. The figures serve as a comparison only.</p>"
        if public
        else ""
    )
    statements = [_privacy_statement(run) for run in private]
    if not statements:
        return warning
    if len(runs) == 1:
        items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in statements[0].items())
        return f"<dl>{items}</dl>"
    rows = [[run.label, *statement.values()] for run, statement in zip(private, statements, strict=True)]
    return warning + _table(["run", *statements[0]], rows, word_columns=1 + len(statements[0]))


def _privacy_statement(run: RunSummary) -> dict[str, str]:
    noise = words.NONE if run.noise_multiplier is None else f"{run.noise_multiplier:.4g}"
    spent = f"{words.guarantee(run).removeprefix('at ')}, the largest over the sites, rounded up"
    unit = run.privacy_unit
    return {
        "Guarantee": f"{spent}; planned epsilon {words.epsilon(run.planned_epsilon)}",
        "Who is protected": f"each {unit} of each site, against everyone who sees the uploads of that site, including "
        "the server",
        "Unit": f"one {unit}; whoever is behind several of them is protected less",
        "Neighbours": run.neighbours,
        "Accountant": f"{run.accountant}; noise multiplier {noise}",
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
    return _table(["run", *spending, *traffic, "sites", "time"], rows, word_columns=2, colours=True)


def _difference_table(runs: Sequence[RunSummary]) -> str:
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "name")  # the name is in the head
    rows = [[key, *(run.config.get(key, words.NONE) for run in runs)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "<p>Nothing: all runs have the same configuration.</p>"
    return _table(["key", *(run.label for run in runs)], differing, word_columns=len(runs) + 1)


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
    table = _table(["site", epsilon, "uplink", "downlink", "admitted", "rejected"], rows, word_columns=1)
    return table + _more(len(run.site_summaries), _MOST_SITES, "sites")


def _rejection_table(run: RunSummary) -> str:
    rows = [row for one in run.rounds for row in _rejection_rows(one)]
    if not rows:
        return "<p>No reply was rejected and no round was abandoned.</p>"
    table = _table(["round", "site", "reason"], rows[:_MOST_REJECTIONS], word_columns=3)
    return table + _more(len(rows), _MOST_REJECTIONS, "rows")


def _rejection_rows(one: RoundSummary) -> Iterable[list[str]]:
    if one.abandoned:
        yield [f"{one.number}", "all", "round abandoned: too few replies, model unchanged"]
    for rejection in one.rejections:
        cut = rejection.reason[:_LONGEST_REASON]
        yield [f"{one.number}", rejection.site, cut if cut == rejection.reason else f"{cut} ..."]


def _config_table(run: RunSummary) -> str:
    return _table(["key", "value"], [[key, value] for key, value in run.config.items()], word_columns=2)


def _more(count: int, shown: int, what: str) -> str:
    return f"<p>And {count - shown} more {what}.</p>" if count > shown else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, word_columns: int, colours: bool = False) -> str:
    """Return a table whose first ``word_columns`` columns hold words and the others figures; all cells are escaped."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        kinds = [""] * word_columns + [' class="number"'] * (len(texts) - word_columns)
        return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    swatches = [f' class="swatch {colour_class(number)}"' if colours else "" for number in range(1, len(rows) + 1)]
    body = "".join(f"<tr{swatch}>{cells('td', row)}</tr>" for swatch, row in zip(swatches, rows, strict=True))
    table = f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'  # tabindex lets a keyboard scroll a wide table


def _figures(runs: Sequence[RunSummary]) -> str:
    return "".join(_figure(chart, _badge(runs)) for chart in charts(runs))


def _figure(chart: Chart, badge: str) -> str:
    marked = "abandoned round" if 'class="mark"' in chart.drawing else ""
    caption = f"<figcaption><h2>{escape(chart.title)}{badge}</h2><p>{escape(chart.note)}</p></figcaption>"
    return f"<figure>{caption}{chart.drawing}{legend_list(chart.legend, marked)}</figure>"


def _unbroken(text: str) -> str:
    """Keep browsers from breaking 1e-05 after its minus sign."""
    return re.sub(r"\d+e-\d+", r"<span>\g<0></span>", text)


def _section(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'


def _details(title: str, body: str) -> str:
    return f'<details class="card"><summary>{escape(title)}</summary>{body}</details>'


def _page(runs: Sequence[RunSummary], kind: str, name: str, headline: str, body: str) -> str:
    warning = words.warning(runs)
    log = RunFolder(runs[0].folder).log.name
    title = f"{name} ({warning})" if warning else name
    unfinished = "" if all(run.finished for run in runs) else ' <span class="badge">unfinished</span>'
    origins = "; ".join(
        f"{run.name}: Fedsieve {run.version}, started {run.started:%Y-%m-%d %H:%M} UTC"
        + (f", resumed {run.resumed} times" if run.resumed else "")
        for run in runs
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} - Fedsieve</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{_STYLE}</style></head><body><main>'
        f'<header><p class="kind">Fedsieve {kind.lower()}{_badge(runs)}{unfinished}</p>'
        f"<h1><bdi>{escape(name)}</bdi></h1>"
        f'<p class="headline">{_unbroken(escape(headline))}.</p></header>\n{body}\n'
        f"<footer><p>{escape(origins)}. Made from {log} alone.</p></footer></main></body></html>\n"
    )


_STYLE = (
    """
:root{--page:#f5f6f8;--card:#fff;--ink:#171b22;--muted:#5d6674;--rule:#e3e6eb;--alert:#b3261e;--alert-ground:#fdeceb}
@media (prefers-color-scheme:dark){:root{--page:#0f1216;--card:#181c22;--ink:#e9ecf1;--muted:#9aa4b2;--rule:#2b313a;
--alert:#ff8a80;--alert-ground:#3a1c1b}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:2.5rem 1.25rem 3rem;display:grid;gap:1.25rem;
grid-template-columns:minmax(0,1fr)}
h1,h2,h3,p,dl,figure{margin:0}
h1{font-size:clamp(1.6rem,4vw,2.4rem);line-height:1.15;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:1.05rem;line-height:1.3}h3{font-size:1rem;margin-top:1rem;overflow-wrap:anywhere}
.kind{color:var(--muted);margin-bottom:.35rem}
.headline{font-size:clamp(1.05rem,2.2vw,1.3rem);margin-top:.75rem;max-width:52em;line-height:1.4;overflow-wrap:anywhere}
.headline span{white-space:nowrap}
.badge{display:inline-block;font-size:.75rem;font-weight:600;line-height:1.3;padding:.1em .6em;border-radius:1em;
border:1px solid currentColor;color:var(--muted);white-space:nowrap;vertical-align:.1em}
.badge.alert{color:var(--alert);background:var(--alert-ground)}
.warning{padding:.75rem 1rem;border-radius:10px;color:var(--alert);background:var(--alert-ground)}
.card,.tile,figure{background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:1.1rem 1.25rem}
.card>h2{margin-bottom:.6rem}.card .card{margin-top:.75rem}
.card>p,.tile p,figcaption p,footer{color:var(--muted);font-size:.9rem}.card>p.warning{color:var(--alert)}
.card>p{margin-top:.5rem}
.tiles{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,19rem),1fr))}
.tile h2{font-size:.9rem;font-weight:500;color:var(--muted)}
.tile .figure{font-size:1.9rem;font-weight:650;color:var(--ink);letter-spacing:-.02em;line-height:1.25}
.meter{height:6px;border-radius:3px;background:var(--rule);margin:.35rem 0 .5rem;overflow:hidden}
.meter i{display:block;height:100%;background:var(--s1);border-radius:3px}
.charts{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr))}
figure{min-width:0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.35rem 1.25rem}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.4rem .9rem .4rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--muted);font-weight:500;white-space:nowrap}
td{overflow-wrap:break-word;min-width:4rem;max-width:34rem}td:first-child{min-width:5.5rem}
tbody tr:last-child td{border-bottom:0}
.number{text-align:right;white-space:nowrap}td.number{overflow-wrap:normal}
.swatch td:first-child{min-width:9rem;font-weight:600;border-left:4px solid var(--c);padding-left:.6rem}
summary{cursor:pointer;font-weight:600;overflow-wrap:anywhere}details[open]>summary{margin-bottom:.6rem}
@media (max-width:560px){main{padding:1.5rem .8rem 2rem;gap:.9rem}.tiles{grid-template-columns:1fr 1fr;gap:.7rem}
.tile,.card,figure{padding:.85rem .9rem}.tile .figure{font-size:1.45rem}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.6rem}}
"""
    + CHART_STYLE
)
