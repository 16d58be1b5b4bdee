"""The communication benchmark on one page, and its poster: what accuracy a number of bytes buys."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from common.config import ConfigValue
from simulations.benchmarks.bytes_plan import FAMILIES, OURS, REFERENCE
from simulations.benchmarks.bytes_results import TOLERANCE, CurvePoint, SettingResult, SystemResult
from simulations.published_docs import markdown
from simulations.report import words
from simulations.report.charts import Chart
from simulations.report.page import details, document, figure, section, table
from simulations.report.poster import poster
from simulations.report.svg import Axis, Point, Series, in_words, line_chart

HEAD = (
    "system",
    "accuracy (%)",
    "uplink MB",
    "downlink MB",
    "uplink saving",
    "total saving",
    f"uplink MB to {REFERENCE} - {100 * TOLERANCE:g}",
)
_MOST_TELLING = (
    REFERENCE,
    "dense f16",
    "dense int8",
    "RS 0.1, f32",
    "RS 0.1, f32 + indices",
    "RS 0.3, calibrated 0.5",
    "RS 0.1, calibrated 0.5",
    "RS 0.1, calibrated 1",
)
_ELSEWHERE = (REFERENCE, "RS 0.3, calibrated 0.5", "RS 0.1, calibrated 1")  # where sites differ
_ACCURACY = Axis("test accuracy", words.percent_tick, from_zero=False)
_DIRECTIONS: Mapping[str, Callable[[CurvePoint], float]] = {
    "uplink": lambda point: point.uplink,
    "uplink and downlink": lambda point: point.total,
}
_SHOWN_RANGE = 0.15  # of accuracy, below the best: how a training begins would press the rest together


def rows(result: SettingResult) -> list[list[str]]:
    """Return the table of a setting, for the terminal and for the page."""
    return [_row(result, system) for system in result.systems.values()]


def _row(result: SettingResult, system: SystemResult) -> list[str]:
    error = "" if system.standard_error is None else f" \N{PLUS-MINUS SIGN} {100 * system.standard_error:.2f}"
    savings = result.uplink_saving(system), result.total_saving(system)
    reached = result.to_reach(system)
    return [
        system.system.name,
        f"{100 * system.accuracy:.2f}{error}",
        _megabytes(system.uplink),
        _megabytes(system.downlink),
        *("-" if saving is None else f"{saving:.2f}x" for saving in savings),
        "-" if reached is None else _megabytes(reached.uplink),
    ]


def markdown_tables(results: Sequence[SettingResult], last: str) -> dict[str, str]:
    """Return what the documentation shows, by name: ``bytes`` is all, ``bytes-short`` the most telling."""
    everything = [_markdown(result, list(result.systems), HEAD) for result in results]
    short = [
        _markdown(one, _MOST_TELLING if one.setting.partition == "iid" else _ELSEWHERE, HEAD[:-1]) for one in results
    ]
    return {"bytes": "\n\n".join([*everything, last]), "bytes-short": "\n\n".join([*short, last])}


def _markdown(result: SettingResult, names: Sequence[str], head: Sequence[str]) -> str:
    chosen = [one for name, one in result.systems.items() if name in names]
    lines = [_row(result, one)[: len(head)] for one in chosen]
    marked = [
        [f"**{line[0]}**" if one.system.family == OURS else line[0], *line[1:]]
        for one, line in zip(chosen, lines, strict=True)
    ]
    return f"{result.setting.title}; seeds: {_seeds(chosen)}\n\n{markdown(head, marked)}"


def _seeds(systems: Iterable[SystemResult]) -> str:
    return " or ".join(str(count) for count in sorted({len(one.seeds) for one in systems}))


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.2f}"


def write_page(
    results: Sequence[SettingResult],
    recipes: Mapping[str, Mapping[str, ConfigValue]],
    headline: str,
    facts: str,
    destination: Path,
) -> None:
    """Write the page: the poster's charts, then table and curves of each setting, then the recipes."""
    body = [_charts(frontier_charts(results))]
    for result in results:
        colours = [_colour(system.system.family) for system in result.systems.values()]
        body.append(
            section(result.setting.title, table(HEAD, rows(result), word_columns=1, colours=colours) + _notes(result))
        )
        body.append(_charts([*curve_charts(result), *reach_charts(result)]))
    listed = [
        [name, ", ".join(f"{key}={value}" for key, value in changes.items())] for name, changes in recipes.items()
    ]
    used = [
        [result.setting.title, system.system.name, system.recipe]
        for result in results
        for system in result.systems.values()
    ]
    body.append(
        details(
            "Recipes",
            table(["recipe", "run config"], listed, word_columns=2)
            + table(["setting", "system", "recipe"], used, word_columns=3),
        )
    )
    destination.write_text(
        document("Benchmark", "Accuracy for the bytes", headline, "".join(body), facts), encoding="utf-8"
    )


def _charts(charts: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(figure(chart) for chart in charts)}</div>' if charts else ""


def write_poster(results: Sequence[SettingResult], facts: str, destination: Path) -> bool:
    """Write the frontier as an SVG file; without any it says so with False."""
    charts = frontier_charts(results)
    if charts:
        destination.write_text(poster("Best test accuracy within an uplink budget", facts, charts), encoding="utf-8")
    return bool(charts)


def frontier_charts(results: Sequence[SettingResult]) -> list[Chart]:
    """Return one chart for each epsilon (iid): the best accuracy within a budget, for each family of systems."""
    return [_frontier_chart(result) for result in results if result.setting.partition == "iid"]


def _frontier_chart(result: SettingResult) -> Chart:
    axis = Axis("uplink of all sites, logarithmic", words.in_bytes, log=True)
    frontiers = result.frontiers
    lowest = max((point.accuracy for points in frontiers.values() for point in points), default=0.0) - _SHOWN_RANGE
    series = [
        Series(family, [_point(p, p.uplink) for p in points if p.accuracy >= lowest], _colour(family), steps=True)
        for family, points in frontiers.items()
        if points[-1].accuracy >= lowest
    ]
    title = f"Epsilon {result.setting.epsilon:g}"
    note = (
        "Best accuracy within an uplink budget, over all rounds, densities and grids of a family (iid); the last "
        f"{100 * _SHOWN_RANGE:g} points."
    )
    return _chart(title, note, series, axis, series)


def curve_charts(result: SettingResult) -> list[Chart]:
    """Return accuracy against uplink and against both directions, a line for each system."""
    return [_curve_chart(result, direction, cost) for direction, cost in _DIRECTIONS.items()]


def reach_charts(result: SettingResult) -> list[Chart]:
    """Return what it took to be nearly as good as the reference, up and both ways, a dot for each system."""
    return [_reach_chart(result, direction, cost) for direction, cost in _DIRECTIONS.items()]


def _reach_chart(result: SettingResult, direction: str, cost: Callable[[CurvePoint], float]) -> Chart:
    reached = [(one, point) for one in result.systems.values() if (point := result.to_reach(one)) is not None]
    series = []
    for one, point in reached:
        tip = f"{one.system.name}: {words.in_bytes(cost(point))}, then {words.percent(one.accuracy)} in the end"
        series.append(Series(one.system.name, [Point(cost(point), one.accuracy, tip)], _colour(one.system.family)))
    target = f"{REFERENCE} less {100 * TOLERANCE:g} points"
    axis = Axis(f"{direction} of all sites to reach {target}, logarithmic", words.in_bytes, log=True)
    note = f"A dot for each system that came to {target}: the bytes that took, and the accuracy in the end."
    return _chart(f"{result.setting.title}: {direction} to reach it", note, series, axis, _families(result))


def _families(result: SettingResult) -> list[Series]:
    """Return the legend: the families that were run."""
    run = {one.system.family for one in result.systems.values()}
    return [Series(family, (), _colour(family)) for family in FAMILIES if family in run]


def _curve_chart(result: SettingResult, direction: str, cost: Callable[[CurvePoint], float]) -> Chart:
    series = [
        Series(one.system.name, [_point(point, cost(point)) for point in one.curve], _colour(one.system.family))
        for one in result.systems.values()
    ]
    axis = Axis(f"{direction} of all sites so far, logarithmic", words.in_bytes, log=True)
    note = "A dot for each round, a line for each density and grid: point at one to see which."
    return _chart(f"{result.setting.title}: {direction}", note, series, axis, _families(result))


def _chart(title: str, note: str, series: Sequence[Series], axis: Axis, legend: Sequence[Series]) -> Chart:
    alternative = " ".join(
        [f"{title}. Test accuracy against {axis.label}.", *(in_words(s, words.percent) for s in series)]
    )
    return Chart(title, note, line_chart(alternative, series, axis, _ACCURACY), legend)


def _point(point: CurvePoint, cost: float) -> Point:
    return Point(
        cost, point.accuracy, f"{words.percent(point.accuracy)} after {words.in_bytes(cost)}, round {point.round}"
    )


def _notes(result: SettingResult) -> str:
    systems = result.systems.values()
    notes = f"Seeds: {_seeds(systems)}; means and \N{PLUS-MINUS SIGN} standard errors; bytes of all sites and rounds."
    if resumed := sum(one.resumed for one in systems):
        notes += f" Runs were stopped and went on {resumed} times; each time, the model was sent in full once more."
    return f"<p>{notes}</p>"


def _colour(family: str) -> int:
    return FAMILIES.index(family) + 1
