"""Run log(s) -> one self-contained HTML page: no script, no external request, readable on a phone and in the dark.

``load_run`` parses a run folder once into frozen dataclasses; ``write_report`` makes a page of one or several of them.
Whatever comes from the log is escaped where it enters the page: run names and rejection reasons are not trusted.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from decimal import ROUND_CEILING, Decimal
from html import escape
from pathlib import Path
from typing import Any

from common.errors import RunFolderError
from server.runlog import Event, read_events
from simulations.charts import (
    CHART_STYLE,
    Axis,
    Bar,
    Formatter,
    Point,
    Series,
    colour_class,
    in_words,
    legend_list,
    line_chart,
    stacked_bars,
)

LOG_NAME = "run.jsonl"
_MOST_SITES = 50
_MOST_REJECTIONS = 200
_LONGEST_REASON = 300
_NONE = "\N{EN DASH}"
_NOT_PRIVATE = "not private"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes in one direction, by what they are for."""

    values: int
    index: int
    header: int
    framing: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.values + self.index + self.header + self.framing


@dataclass(frozen=True, slots=True)
class Rejection:
    """One reply that the server did not use."""

    site: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """One round; accuracy is None where not evaluated, epsilon is None where nothing is private."""

    number: int
    density: float
    admitted: int
    rejections: tuple[Rejection, ...]
    abandoned: bool
    accuracy: float | None
    epsilon: float | None
    uplink: Traffic
    downlink: Traffic
    dense_uplink: int
    dense_downlink: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSummary:
    """What the whole run cost one site."""

    site: str
    epsilon: float | None
    uplink: int
    downlink: int
    admitted: int
    rejected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run as far as its log goes; where it has no ``end`` event the totals are those of the rounds so far."""

    folder: Path
    name: str
    version: str
    started: datetime
    resumed: int
    finished: bool
    config: Mapping[str, str]
    parameters: int
    private: bool
    noise_multiplier: float | None
    accountant: str
    privacy_unit: str
    neighbours: str
    sites: int
    planned_epsilon: float | None
    delta: float | None
    initial_accuracy: float | None
    rounds: tuple[RoundSummary, ...]
    accuracy: float | None
    epsilon: float | None
    uplink: int
    downlink: int
    dense_uplink: int
    dense_downlink: int
    total_density: float | None
    seconds: float
    site_summaries: tuple[SiteSummary, ...]

    @property
    def label(self) -> str:
        """The name, never without the warning that it needs."""
        return self.name if self.private else f"{self.name} ({_NOT_PRIVATE})"

    @property
    def progress(self) -> str:
        """How far the run went, in words."""
        planned = self.config.get("rounds", "?")
        return f"{len(self.rounds)} rounds" if self.finished else f"unfinished, {len(self.rounds)} of {planned} rounds"


# --- From the log to the summary ---------------------------------------------------------------------------------


def load_run(folder: Path) -> RunSummary:
    """Parse the log of a run folder; a folder without a usable log is a RunFolderError."""
    path = folder / LOG_NAME
    if not path.is_file():
        raise RunFolderError(f"{folder} has no {LOG_NAME}: expected the folder of a run, such as runs/<name>")
    start: Event | None = None
    end: Event | None = None
    rounds: list[RoundSummary] = []
    resumed = 0
    try:
        for event in read_events(path):
            match event["event"]:
                case "run":
                    start = start or event
                case "resume":
                    resumed, end = resumed + 1, None
                case "round":
                    rounds.append(_round(event))
                case "end":
                    end = event
        if start is None:
            raise RunFolderError(
                f"{path} has no 'run' event: the run never started; start it again or name another folder"
            )
        return _run(folder, start, tuple(rounds), end, resumed)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise RunFolderError(
            f"{path} does not follow the schema of the run log ({type(error).__name__}: {error}): restore the file, or "
            "make the report with the version of Fedsieve that wrote it"
        ) from error


def _run(folder: Path, start: Event, rounds: tuple[RoundSummary, ...], end: Event | None, resumed: int) -> RunSummary:
    totals = _totals(rounds, _number(start["initial_accuracy"])) if end is None else end
    config = {
        str(key): value if isinstance(value, str) else json.dumps(value) for key, value in start["config"].items()
    }
    return RunSummary(
        folder=folder,
        name=str(start["name"]) or folder.name,
        version=str(start["version"]),
        started=datetime.fromtimestamp(float(start["time"]), UTC),
        resumed=resumed,
        finished=end is not None,
        config=config,
        parameters=int(start["parameters"]),
        private=start["private"] is True,  # anything unclear is not private
        noise_multiplier=_number(start["noise_multiplier"]),
        accountant=str(start["accountant"]),
        privacy_unit=str(start["privacy_unit"]),
        neighbours=str(start["neighbours"]),
        sites=int(start["sites"]),
        planned_epsilon=_number(start["planned_epsilon"]),
        delta=_number(start["config"].get("delta")),
        initial_accuracy=_number(start["initial_accuracy"]),
        rounds=rounds,
        accuracy=_number(totals["accuracy"]),
        epsilon=_number(totals["epsilon"]),
        uplink=_total(totals["uplink"]),
        downlink=_total(totals["downlink"]),
        dense_uplink=int(totals["dense_uplink"]),
        dense_downlink=int(totals["dense_downlink"]),
        total_density=_number(totals["total_density"]),
        seconds=float(totals["seconds"]),
        site_summaries=tuple(_site(site) for site in totals["sites"]),
    )


def _totals(rounds: Sequence[RoundSummary], initial_accuracy: float | None) -> Event:
    """Return what the ``end`` event would say if the run had ended here, except for the sites."""
    uploads = sum(one.admitted for one in rounds)
    density = sum(one.density * one.admitted for one in rounds) / uploads if uploads else None
    return {
        "accuracy": next((one.accuracy for one in reversed(rounds) if one.accuracy is not None), initial_accuracy),
        "epsilon": next((one.epsilon for one in reversed(rounds) if one.epsilon is not None), None),
        "uplink": sum(one.uplink.total for one in rounds),
        "downlink": sum(one.downlink.total for one in rounds),
        "dense_uplink": sum(one.dense_uplink for one in rounds),
        "dense_downlink": sum(one.dense_downlink for one in rounds),
        "total_density": density,
        "seconds": sum(one.seconds for one in rounds),
        "sites": (),
    }


def _round(event: Event) -> RoundSummary:
    return RoundSummary(
        number=int(event["round"]),
        density=float(event["density"]),
        admitted=int(event["admitted"]),
        rejections=tuple(Rejection(str(one["site"]), str(one["reason"])) for one in event["rejections"]),
        abandoned=bool(event["abandoned"]),
        accuracy=_number(event["accuracy"]),
        epsilon=_number(event["epsilon"]),
        uplink=_traffic(event["uplink"]),
        downlink=_traffic(event["downlink"]),
        dense_uplink=int(event["dense_uplink"]),
        dense_downlink=int(event["dense_downlink"]),
        seconds=float(event["seconds"]),
    )


def _site(raw: Mapping[str, Any]) -> SiteSummary:
    return SiteSummary(
        site=str(raw["site"]),
        epsilon=_number(raw["epsilon"]),
        uplink=_total(raw["uplink"]),
        downlink=_total(raw["downlink"]),
        admitted=int(raw["admitted"]),
        rejected=int(raw["rejected"]),
    )


def _traffic(raw: Mapping[str, Any]) -> Traffic:
    return Traffic(**{part.name: int(raw[part.name]) for part in fields(Traffic)})


def _total(raw: Any) -> int:
    return _traffic(raw).total if isinstance(raw, dict) else int(raw)


def _number(raw: Any) -> float | None:
    """Return null and NaN (a diverged model) as None: both mean that there is no figure."""
    value = None if raw is None else float(raw)
    return None if value is None or math.isnan(value) else value


# --- Figures in words ----------------------------------------------------------------------------------------------


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f} %"


def _percent_tick(value: float) -> str:
    return f"{100 * value:.4g} %"


def _epsilon(value: float | None) -> str:
    """Round up: a printed epsilon is a promise, and the promise must hold."""
    if value is None:
        return _NONE
    return str(Decimal(repr(value)).quantize(Decimal("0.01"), ROUND_CEILING)) if math.isfinite(value) else "infinite"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _against_dense(cost: int, dense: int) -> str:
    if not cost or not dense:
        return "nothing sent yet"
    ratio = dense / cost
    if 0.995 < ratio < 1.005:
        return "as much as dense"
    return f"{ratio:.3g}x less than dense" if ratio > 1 else f"{1 / ratio:.3g}x more than dense"


def _spent(run: RunSummary) -> str:
    """Return the epsilon spent; only a run without rounds has spent nothing, a missing figure is not a zero."""
    if run.epsilon is None:
        return "unknown" if run.rounds else _epsilon(0.0)
    return _epsilon(run.epsilon)


def _guarantee(run: RunSummary) -> str:
    if not run.private:
        return "without any privacy"
    delta = _NONE if run.delta is None else f"{run.delta:g}"
    return f"at (epsilon {_spent(run)}, delta {delta}) per {run.privacy_unit}"


def _headline(run: RunSummary) -> str:
    accuracy = "No accuracy measured" if run.accuracy is None else f"{_percent(run.accuracy)} test accuracy"
    warning = "" if run.private else "Not private: "
    so_far = "" if run.finished else f" so far ({run.progress})"
    traffic = f"uplink {_bytes(run.uplink)}, {_against_dense(run.uplink, run.dense_uplink)}"
    return f"{warning}{accuracy} {_guarantee(run)}{so_far}; {traffic if run.uplink else 'nothing uploaded yet'}"


def _comparison_headline(runs: Sequence[RunSummary]) -> str:
    parts = []
    for private in (True, False):
        evaluated = [(run.accuracy, run) for run in runs if run.accuracy is not None and run.private is private]
        if evaluated:
            _, best = max(evaluated, key=lambda pair: pair[0])
            parts.append(f"highest accuracy: {best.label}, {_percent(best.accuracy)} {_guarantee(best)}")
    complete = [run for run in runs if run.finished and run.uplink]
    if complete:
        least = min(complete, key=lambda run: run.uplink)
        ratio = _against_dense(least.uplink, least.dense_uplink)
        parts.append(f"least uplink: {least.label}, {_bytes(least.uplink)}, {ratio}")
    text = "; ".join(parts) or "nothing measured yet"
    return text[0].upper() + text[1:]


# --- Charts --------------------------------------------------------------------------------------------------------

_ROUND_AXIS = Axis("round", lambda value: f"{value:.0f}", whole=True)


def _charts(runs: Sequence[RunSummary]) -> str:
    start = f" {_percent(runs[0].initial_accuracy)} before training." if len(runs) == 1 else ""
    accuracy = Axis("test accuracy", _percent_tick, from_zero=False)
    epsilon = Axis("epsilon", lambda value: f"{value:g}")
    density = Axis("density", _percent_tick)
    plans = sorted({run.planned_epsilon for run in runs if run.private and run.planned_epsilon is not None})
    longest = max(runs, key=lambda run: len(run.rounds)).rounds
    planned = [
        Series(f"planned {_epsilon(plan)}", [Point(one.number, plan, "") for one in longest], 0) for plan in plans
    ]
    spent = "Largest over the sites, all rounds so far."
    share = "Share of the parameters that each upload carries."
    return "".join(
        [
            _round_chart(
                runs, "Test accuracy", f"After each round.{start}", lambda one: one.accuracy, _percent, accuracy
            ),
            _price_chart(runs, accuracy),
            _round_chart(runs, "Epsilon spent", spent, lambda one: one.epsilon, _epsilon, epsilon, planned),
            _round_chart(runs, "Density", share, lambda one: one.density, _percent, density),
            _traffic_chart(runs, "Uplink", lambda one: one.uplink, lambda one: one.dense_uplink),
            _traffic_chart(runs, "Downlink", lambda one: one.downlink, lambda one: one.dense_downlink),
        ]
    )


def _round_chart(
    runs: Sequence[RunSummary],
    title: str,
    note: str,
    measure: Callable[[RoundSummary], float | None],
    show: Formatter,
    axis: Axis,
    levels: Sequence[Series] = (),
) -> str:
    series = [
        Series(
            run.label if len(runs) > 1 else axis.label,
            [_round_point(one, measure(one), show) for one in run.rounds],
            colour,
        )
        for colour, run in enumerate(runs, start=1)
    ]
    alternative = _alternative(runs, title, series, show, levels)
    empty = "Nothing measured yet" if any(run.private for run in runs) else f"Nothing measured, {_NOT_PRIVATE}"
    drawing = line_chart(alternative, series, _ROUND_AXIS, axis, levels=levels, marks=_marks(runs), empty=empty)
    return _figure(runs, title, note, drawing, [*series, *levels])


def _price_chart(runs: Sequence[RunSummary], axis: Axis) -> str:
    series = []
    for colour, run in enumerate(runs, start=1):
        sent, points = 0, []
        for one in run.rounds:
            sent += one.uplink.total
            points.append(Point(sent, one.accuracy, f"{_percent(one.accuracy)} after {_bytes(sent)}"))
        series.append(Series(run.label if len(runs) > 1 else axis.label, points, colour))
    title = "Accuracy for the bytes"
    drawing = line_chart(_alternative(runs, title, series, _percent), series, Axis("uplink so far", _bytes), axis)
    return _figure(runs, title, "Test accuracy against everything uploaded so far.", drawing, series)


def _traffic_chart(
    runs: Sequence[RunSummary],
    direction: str,
    traffic: Callable[[RoundSummary], Traffic],
    dense: Callable[[RoundSummary], int],
) -> str:
    title, axis = f"{direction} per round", Axis("bytes", _bytes)
    prices = {tuple((one.number, dense(one)) for one in run.rounds): run for run in runs if run.rounds}
    levels = [
        Series("dense, 4 bytes per parameter", [Point(number, price, _bytes(price)) for number, price in price_list], 0)
        for price_list in prices
    ]
    totals = [
        Series(
            run.label if len(runs) > 1 else direction.lower(),
            [_round_point(one, traffic(one).total, _bytes) for one in run.rounds],
            colour,
        )
        for colour, run in enumerate(runs, start=1)
    ]
    alternative = _alternative(runs, title, totals, _bytes, levels)
    note = "All sites together; dashed: the same messages with every parameter as a 4-byte number."
    if len(runs) > 1:
        drawing = line_chart(alternative, totals, _ROUND_AXIS, axis, levels=levels, marks=_marks(runs))
        return _figure(runs, title, note, drawing, [*totals, *levels[:1]])
    names = [part.name for part in fields(Traffic)]
    amounts = {name: [getattr(traffic(one), name) for one in runs[0].rounds] for name in names}
    bars = [
        Bar(one.number, parts, _bar_tip(one, dict(zip(names, parts, strict=True)), dense(one)))
        for one, parts in zip(runs[0].rounds, zip(*amounts.values(), strict=True), strict=True)
    ]
    drawing = stacked_bars(alternative, bars, _ROUND_AXIS, axis, levels=levels, marks=_marks(runs))
    legend = [Series(f"{name} {_bytes(sum(amounts[name]))}", (), colour) for colour, name in enumerate(names, start=1)]
    return _figure(runs, title, note, drawing, [*legend, *levels])


def _bar_tip(one: RoundSummary, parts: Mapping[str, int], dense: int) -> str:
    split = ", ".join(f"{name} {_bytes(amount)}" for name, amount in parts.items())
    return f"round {one.number}: {_bytes(sum(parts.values()))} ({split}; dense {_bytes(dense)})"


def _round_point(one: RoundSummary, value: float | None, show: Formatter) -> Point:
    figure = _NONE if value is None else show(value)
    return Point(one.number, value, f"{figure} in round {one.number}")


def _marks(runs: Sequence[RunSummary]) -> list[Point]:
    """Mark abandoned rounds, but only where a mark can belong to no other run."""
    rounds = runs[0].rounds if len(runs) == 1 else ()
    return [Point(one.number, None, f"round {one.number} was abandoned") for one in rounds if one.abandoned]


def _alternative(
    runs: Sequence[RunSummary], title: str, series: Sequence[Series], show: Formatter, levels: Sequence[Series] = ()
) -> str:
    heading = f"{title} ({_warning(runs)})." if _warning(runs) else f"{title}."
    return " ".join([heading, *(in_words(one, show) for one in series), *(f"Dashed: {one.label}." for one in levels)])


# --- Page ----------------------------------------------------------------------------------------------------------


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
        f'<div class="charts">{_charts([run])}</div>',
        _section("Sites", _site_table(run)),
        _section("Rejections", _rejection_table(run)),
        _details("Full configuration", _config_table(run)),
    ]
    return _page([run], "Run report", run.name, _headline(run), "".join(body))


def _comparison_page(runs: Sequence[RunSummary]) -> str:
    each = [_details(run.label, _site_table(run) + _rejection_table(run) + _config_table(run)) for run in runs]
    body = [
        _section("The runs side by side", _run_table(runs)),
        f'<div class="charts">{_charts(runs)}</div>',
        _section("What differs in the configuration", _difference_table(runs)),
        _section("Privacy", _privacy(runs)),
        _section("Sites, rejections and full configuration", "".join(each)),
    ]
    return _page(runs, "Comparison", f"{len(runs)} runs compared", _comparison_headline(runs), "".join(body))


def _warning(runs: Sequence[RunSummary]) -> str:
    """Return the label that every output needs: empty when all runs are private."""
    public = sum(not run.private for run in runs)
    return "" if not public else _NOT_PRIVATE if public == len(runs) else f"{public} of {len(runs)} {_NOT_PRIVATE}"


def _badge(runs: Sequence[RunSummary]) -> str:
    return f' <span class="badge alert">{_warning(runs)}</span>' if _warning(runs) else ""


def _tiles(run: RunSummary) -> str:
    before = "" if run.initial_accuracy is None else f"{_percent(run.initial_accuracy)} before training"
    density = _NONE if run.total_density is None else _percent(run.total_density)
    delta = "" if run.delta is None else f", delta {run.delta:g}"
    plan = f"of {_epsilon(run.planned_epsilon)} planned{delta}" if run.private else "no clipping, no noise"
    spent = _spent(run) if run.private else "unlimited"
    share = run.epsilon / run.planned_epsilon if run.private and run.epsilon and run.planned_epsilon else None
    return "".join(
        [
            _tile(run, "Test accuracy", _percent(run.accuracy), before, run.accuracy),
            _tile(run, "Epsilon spent", spent, plan, share),
            _traffic_tile(run, "Uplink", run.uplink, run.dense_uplink),
            _traffic_tile(run, "Downlink", run.downlink, run.dense_downlink),
            _tile(run, "Total density", density, f"of {run.parameters:,} parameters per upload", run.total_density),
            _tile(run, "Time", _duration(run.seconds), f"{run.progress}, {run.sites} sites", None),
        ]
    )


def _traffic_tile(run: RunSummary, label: str, cost: int, dense: int) -> str:
    compared = f"{_against_dense(cost, dense)} ({_bytes(dense)})" if cost else "nothing sent yet"
    return _tile(run, label, _bytes(cost), compared, cost / dense if dense else None)


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
    return warning + _table(["run", *statements[0]], rows, words=1 + len(statements[0]))


def _privacy_statement(run: RunSummary) -> dict[str, str]:
    noise = _NONE if run.noise_multiplier is None else f"{run.noise_multiplier:.4g}"
    spent = f"{_guarantee(run).removeprefix('at ')}, the largest over the sites, rounded up"
    unit = run.privacy_unit
    return {
        "Guarantee": f"{spent}; planned epsilon {_epsilon(run.planned_epsilon)}",
        "Who is protected": f"each {unit} of each site, against everyone who sees the uploads of that site, including "
        "the server",
        "Unit": f"one {unit}; whoever is behind several of them is protected less",
        "Neighbours": run.neighbours,
        "Accountant": f"{run.accountant}; noise multiplier {noise}",
    }


def _run_table(runs: Sequence[RunSummary]) -> str:
    head = [
        "run",
        "progress",
        "accuracy",
        "epsilon",
        "delta",
        "noise",
        "uplink",
        "saving",
        "downlink",
        "density",
    ]
    rows = [
        [
            run.label,
            run.progress,
            _percent(run.accuracy),
            f"{_spent(run)} of {_epsilon(run.planned_epsilon)}" if run.private else _NOT_PRIVATE,
            _NONE if run.delta is None or not run.private else f"{run.delta:g}",
            _NONE if run.noise_multiplier is None or not run.private else f"{run.noise_multiplier:.4g}",
            _bytes(run.uplink),
            f"{run.dense_uplink / run.uplink:.3g}x" if run.uplink else _NONE,
            _bytes(run.downlink),
            _percent(run.total_density),
            f"{run.sites}",
            _duration(run.seconds),
        ]
        for run in runs
    ]
    return _table([*head, "sites", "time"], rows, words=2, colours=True)


def _difference_table(runs: Sequence[RunSummary]) -> str:
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "name")  # the name is in the head
    rows = [[key, *(run.config.get(key, _NONE) for run in runs)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "<p>Nothing: all runs have the same configuration.</p>"
    return _table(["key", *(run.label for run in runs)], differing, words=len(runs) + 1)


def _site_table(run: RunSummary) -> str:
    if not run.site_summaries:
        return "<p>Sites are summed up when the run ends.</p>"
    rows = [
        [
            one.site,
            _epsilon(one.epsilon),
            _bytes(one.uplink),
            _bytes(one.downlink),
            f"{one.admitted}",
            f"{one.rejected}",
        ]
        for one in run.site_summaries[:_MOST_SITES]
    ]
    epsilon = "epsilon" if run.private else f"epsilon ({_NOT_PRIVATE})"
    table = _table(["site", epsilon, "uplink", "downlink", "admitted", "rejected"], rows, words=1)
    return table + _more(len(run.site_summaries), _MOST_SITES, "sites")


def _rejection_table(run: RunSummary) -> str:
    rows = [row for one in run.rounds for row in _rejection_rows(one)]
    if not rows:
        return "<p>No reply was rejected and no round was abandoned.</p>"
    table = _table(["round", "site", "reason"], rows[:_MOST_REJECTIONS], words=3)
    return table + _more(len(rows), _MOST_REJECTIONS, "rows")


def _rejection_rows(one: RoundSummary) -> Iterable[list[str]]:
    if one.abandoned:
        yield [f"{one.number}", "all", "round abandoned: too few replies, model unchanged"]
    for rejection in one.rejections:
        cut = rejection.reason[:_LONGEST_REASON]
        yield [f"{one.number}", rejection.site, cut if cut == rejection.reason else f"{cut} ..."]


def _config_table(run: RunSummary) -> str:
    return _table(["key", "value"], [[key, value] for key, value in run.config.items()], words=2)


def _more(count: int, shown: int, what: str) -> str:
    return f"<p>And {count - shown} more {what}.</p>" if count > shown else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int, colours: bool = False) -> str:
    """Return a table whose first ``words`` columns hold words and the others figures; all cells are escaped."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        kinds = [""] * words + [' class="number"'] * (len(texts) - words)
        return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    swatches = [f' class="swatch {colour_class(number)}"' if colours else "" for number in range(1, len(rows) + 1)]
    body = "".join(f"<tr{swatch}>{cells('td', row)}</tr>" for swatch, row in zip(swatches, rows, strict=True))
    table = f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'  # tabindex lets a keyboard scroll a wide table


def _figure(runs: Sequence[RunSummary], title: str, note: str, drawing: str, legend: Sequence[Series]) -> str:
    marked = "abandoned round" if 'class="mark"' in drawing else ""
    caption = f"<figcaption><h2>{escape(title)}{_badge(runs)}</h2><p>{escape(note)}</p></figcaption>"
    return f"<figure>{caption}{drawing}{legend_list(legend, marked)}</figure>"


def _unbroken(text: str) -> str:
    """Keep browsers from breaking 1e-05 after its minus sign."""
    return re.sub(r"\d+e-\d+", r"<span>\g<0></span>", text)


def _section(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'


def _details(title: str, body: str) -> str:
    return f'<details class="card"><summary>{escape(title)}</summary>{body}</details>'


def _page(runs: Sequence[RunSummary], kind: str, name: str, headline: str, body: str) -> str:
    warning = _warning(runs)
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
        f"<footer><p>{escape(origins)}. Made from {LOG_NAME} alone.</p></footer></main></body></html>\n"
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
