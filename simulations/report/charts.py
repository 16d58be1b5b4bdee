"""Which charts a report has, for one run and for several; ``svg`` draws them and ``page`` frames them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.coding import PartBytes
from simulations.report import words
from simulations.report.summary import NOT_PRIVATE, RoundSummary, RunSummary
from simulations.report.svg import Axis, Bar, Formatter, Point, Series, in_words, line_chart, stacked_bars

PARTS = ("values", "index", "header", "framing")  # of PartBytes, the largest at the bottom of a bar
_TALLEST = 3.0  # times the highest measurement: what is higher is told, not drawn
_ROUND_AXIS = Axis("round", lambda value: f"{value:.0f}", whole=True)


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing (SVG, escaped) and the words around it (not escaped)."""

    title: str
    note: str
    drawing: str
    legend: Sequence[Series]


def charts(runs: Sequence[RunSummary]) -> list[Chart]:
    """Return the charts of a report in the order of the page; several runs share each of them."""
    start = f" {words.percent(runs[0].initial_accuracy)} before training." if len(runs) == 1 else ""
    accuracy = Axis("test accuracy", words.percent_tick, from_zero=False)
    epsilon = Axis("epsilon", lambda value: f"{value:g}")
    density = Axis("density", words.percent_tick)
    plans = sorted({run.planned_epsilon for run in runs if run.private and run.planned_epsilon is not None})
    longest = max(runs, key=lambda run: len(run.rounds)).rounds
    planned = [
        Series(f"planned {words.epsilon(plan)}", [Point(one.number, plan, "") for one in longest], 0) for plan in plans
    ]
    spent = "Largest over the sites, all rounds so far."
    if all(run.has_loss_alone for run in runs):
        before = f" {words.loss(runs[0].initial_loss)} before training." if len(runs) == 1 else ""
        axis = Axis("test loss", words.loss, from_zero=False)
        quality = [
            _round_chart(runs, "Test loss", f"After each round.{before}", lambda one: one.loss, words.loss, axis)
        ]
    else:
        title, note = "Test accuracy", f"After each round.{start}"
        quality = [
            _round_chart(runs, title, note, lambda one: one.accuracy, words.percent, accuracy),
            _price_chart(runs, accuracy),
        ]
    return [
        *quality,
        _round_chart(runs, "Epsilon spent", spent, lambda one: one.epsilon, words.epsilon, epsilon, planned),
        _density_chart(runs, density),
        _traffic_chart(runs, "Uplink", lambda one: one.uplink, lambda one: one.dense_uplink),
        _traffic_chart(runs, "Downlink", lambda one: one.downlink, lambda one: one.dense_downlink),
    ]


def _round_chart(
    runs: Sequence[RunSummary],
    title: str,
    note: str,
    measure: Callable[[RoundSummary], float | None],
    show: Formatter,
    axis: Axis,
    levels: Sequence[Series] = (),
) -> Chart:
    series = [
        Series(
            run.label if len(runs) > 1 else axis.label,
            [_round_point(one, measure(one), show) for one in run.rounds],
            colour,
        )
        for colour, run in enumerate(runs, start=1)
    ]
    alternative = _alternative(runs, title, series, show, levels)
    empty = "Nothing measured yet" if any(run.private for run in runs) else f"Nothing measured, {NOT_PRIVATE}"
    drawing = line_chart(alternative, series, _ROUND_AXIS, axis, levels=levels, marks=_marks(runs), empty=empty)
    return Chart(title, note, drawing, [*series, *levels])


def _density_chart(runs: Sequence[RunSummary], axis: Axis) -> Chart:
    """Draw steps: a mask stays for an epoch, and so does the density."""
    title, note = "Density and mask schedule", "Share of the parameters that each upload carries."
    if len(runs) == 1 and runs[0].rounds:
        note += f" {words.schedule(runs[0])}"
    series = [
        Series(
            run.label if len(runs) > 1 else axis.label,
            [
                Point(
                    one.number,
                    one.density,
                    f"{words.percent(one.density)} in round {one.number} ({one.kept:,} of {run.parameters:,} kept, "
                    f"mask {one.epoch + 1})",
                )
                for one in run.rounds
            ],
            colour,
            steps=True,
        )
        for colour, run in enumerate(runs, start=1)
    ]
    alternative = _alternative(runs, title, series, words.percent)
    return Chart(title, note, line_chart(alternative, series, _ROUND_AXIS, axis, marks=_marks(runs)), series)


def _price_chart(runs: Sequence[RunSummary], axis: Axis) -> Chart:
    series = []
    for colour, run in enumerate(runs, start=1):
        sent, points = 0, []
        for one in run.rounds:
            sent += one.uplink.total
            points.append(Point(sent, one.accuracy, f"{words.percent(one.accuracy)} after {words.in_bytes(sent)}"))
        series.append(Series(run.label if len(runs) > 1 else axis.label, points, colour))
    title = "Accuracy for the bytes"
    drawing = line_chart(
        _alternative(runs, title, series, words.percent), series, Axis("uplink so far", words.in_bytes), axis
    )
    return Chart(title, "Test accuracy against everything uploaded so far.", drawing, series)


def _traffic_chart(
    runs: Sequence[RunSummary],
    direction: str,
    traffic: Callable[[RoundSummary], PartBytes],
    dense: Callable[[RoundSummary], int],
) -> Chart:
    title, axis = f"{direction} per round", Axis("bytes", words.in_bytes)
    colours = {run.label: colour for colour, run in enumerate(runs, start=1)}
    prices: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for run in runs:
        if run.rounds:
            prices.setdefault(tuple((one.number, dense(one)) for one in run.rounds), []).append(run.label)
    levels = [
        Series(
            "dense, 4 bytes per parameter" + (f": {', '.join(labels)}" if len(prices) > 1 else ""),
            [Point(number, price, words.in_bytes(price)) for number, price in price_list],
            colours[labels[0]] if len(prices) > 1 else 0,
            dashed=True,
        )
        for price_list, labels in prices.items()
    ]
    totals = [
        Series(
            run.label if len(runs) > 1 else direction.lower(),
            [_round_point(one, traffic(one).total, words.in_bytes) for one in run.rounds],
            colour,
        )
        for colour, run in enumerate(runs, start=1)
    ]
    highest = max((point.y or 0 for series in totals for point in series.points), default=0)
    price = max((point.y or 0 for series in levels for point in series.points), default=0)
    note = "All sites together; dashed: the same messages with every parameter as a 4-byte number."
    if price > _TALLEST * highest > 0:
        levels = []  # at its scale the parts could not be told apart
        note = (
            f"All sites together. Dense, every parameter as a 4-byte number, would be {words.in_bytes(price)} a round: "
            f"{price / highest:.3g} times the height of this chart."
        )
    alternative = _alternative(runs, title, totals, words.in_bytes, levels)
    if len(runs) > 1:
        drawing = line_chart(alternative, totals, _ROUND_AXIS, axis, levels=levels, marks=_marks(runs))
        return Chart(title, note, drawing, [*totals, *levels])
    amounts = {name: [getattr(traffic(one), name) for one in runs[0].rounds] for name in PARTS}
    bars = [
        Bar(one.number, parts, _bar_tip(one, dict(zip(PARTS, parts, strict=True)), dense(one)))
        for one, parts in zip(runs[0].rounds, zip(*amounts.values(), strict=True), strict=True)
    ]
    drawing = stacked_bars(alternative, bars, _ROUND_AXIS, axis, levels=levels, marks=_marks(runs))
    legend = [
        Series(f"{name} {words.in_bytes(sum(amounts[name]))}", (), colour) for colour, name in enumerate(PARTS, start=1)
    ]
    return Chart(title, note, drawing, [*legend, *levels])


def _bar_tip(one: RoundSummary, parts: Mapping[str, int], dense: int) -> str:
    split = ", ".join(f"{name} {words.in_bytes(amount)}" for name, amount in parts.items())
    return f"round {one.number}: {words.in_bytes(sum(parts.values()))} ({split}; dense {words.in_bytes(dense)})"


def _round_point(one: RoundSummary, value: float | None, show: Formatter) -> Point:
    figure = words.NONE if value is None else show(value)
    return Point(one.number, value, f"{figure} in round {one.number}")


def _marks(runs: Sequence[RunSummary]) -> list[Point]:
    """Mark abandoned rounds, but only where a mark can belong to no other run."""
    rounds = runs[0].rounds if len(runs) == 1 else ()
    return [Point(one.number, None, f"round {one.number} was abandoned") for one in rounds if one.abandoned]


def _alternative(
    runs: Sequence[RunSummary], title: str, series: Sequence[Series], show: Formatter, levels: Sequence[Series] = ()
) -> str:
    heading = f"{title} ({words.warning(runs)})." if words.warning(runs) else f"{title}."
    return " ".join([heading, *(in_words(one, show) for one in series), *(f"Dashed: {one.label}." for one in levels)])
