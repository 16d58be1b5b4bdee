"""Line and stacked-bar charts as inline SVG: no library, no script, colours from the page's CSS variables.

Every point and bar carries a ``<title>``, which browsers show as a tooltip; the whole chart carries its figures in
words as ``aria-label``. Texts are escaped here, so callers pass them as they are.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from simulations.report.style import COLOURS

Formatter = Callable[[float], str]

WIDTH, HEIGHT = 460.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 12.0, 12.0, 42.0
_BAR_SHARE = 0.72  # of the width of a round; the rest is the gap between two bars
_MANY_POINTS = 60  # from here on, full-sized dots would touch each other


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement; ``y`` is None where nothing was measured, which leaves a gap.

    ``error`` is drawn as far up and down.
    """

    x: float
    y: float | None
    tip: str
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Series:
    """Measurements that belong together. ``colour`` counts from 1 and wraps round; 0 is the neutral colour.

    ``steps`` keeps the line level up to the next measurement, for what can only jump; ``dashed`` is for the key.
    """

    label: str
    points: Sequence[Point]
    colour: int
    steps: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar; the first part lies at the bottom."""

    x: float
    parts: Sequence[float]
    tip: str


@dataclass(frozen=True, slots=True)
class Axis:
    """What is along an axis.

    ``whole`` and ``log`` are for x: ``whole`` keeps ticks at whole numbers and leaves half a unit of room at both ends,
    ``log`` is logarithmic and takes numbers above 0 only. ``from_zero`` is for y.
    """

    label: str
    show: Formatter
    whole: bool = False
    from_zero: bool = True
    log: bool = False


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps data to the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    y_ticks: Sequence[float]
    x_log: bool

    def x(self, value: float) -> float:
        if self.x_log:
            share = math.log(value / self.x_low) / math.log(self.x_high / self.x_low)
        else:
            share = (value - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - _TOP - _BOTTOM)


def line_chart(
    alternative: str,
    series: Sequence[Series],
    x_axis: Axis,
    y_axis: Axis,
    *,
    levels: Sequence[Series] = (),
    marks: Sequence[Point] = (),
    empty: str = "Nothing measured yet",
) -> str:
    """Draw one line per series, dashed ``levels`` (a limit or a price per round) and ``marks`` (vertical, at x)."""
    measured = [point for one in series for point in one.points if _is_measured(point)]
    if not measured:
        return _placeholder(alternative, empty)
    all_points = [*measured, *(point for level in levels for point in level.points if _is_measured(point))]
    heights = [_height(point) + sign * point.error for point in all_points for sign in (-1, 1)]
    frame = _frame([point.x for point in all_points], heights, x_axis, y_axis)
    drawn = [*(_marks(frame, marks)), *(_level(frame, level) for level in levels)]
    drawn += [_line(frame, one) for one in series]
    return _svg(alternative, _axes(frame, x_axis, y_axis) + "".join(drawn))


def stacked_bars(
    alternative: str,
    bars: Sequence[Bar],
    x_axis: Axis,
    y_axis: Axis,
    *,
    levels: Sequence[Series] = (),
    marks: Sequence[Point] = (),
    empty: str = "Nothing measured yet",
) -> str:
    """Draw one bar per x, its parts on top of each other in the colours 1, 2, ..."""
    if not bars:
        return _placeholder(alternative, empty)
    level_points = [point for level in levels for point in level.points if _is_measured(point)]
    heights = [sum(bar.parts) for bar in bars] + [_height(point) for point in level_points]
    frame = _frame([bar.x for bar in bars], heights, x_axis, y_axis)
    drawn = [_bar(frame, bar) for bar in bars]
    drawn += [*_marks(frame, marks), *(_level(frame, level) for level in levels)]
    return _svg(alternative, _axes(frame, x_axis, y_axis) + "".join(drawn))


def in_words(series: Series, show: Formatter) -> str:
    """Say where a series starts, ends and peaks, for readers who do not see the chart."""
    points = [point for point in series.points if _is_measured(point)]
    if not points:
        return f"{series.label}: nothing measured."
    highest = max(points, key=_height)
    ends = f"{series.label}: first {points[0].tip}, last {points[-1].tip}, highest {show(_height(highest))}"
    return f"{ends}, {len(points)} points."


def nice_ticks(low: float, high: float, *, whole: bool = False, goal: int = 5) -> list[float]:
    """Return ticks at multiples of 1, 2 or 5 times a power of ten; the first is <= low and the last >= high."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / goal))
    # The tolerance keeps 0.2 / 0.1 = 2.0000000000000004 from asking for the next larger step.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * (1 + 1e-9) >= span / goal)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float, *, most: int = 7) -> list[float]:
    """Return the ticks between ``low`` and ``high`` of a logarithmic axis, both above 0.

    They are at 1, 2 and 5 times the powers of ten; at fewer of the powers where that would be more than ``most``, and
    evenly spaced where it would be one or none.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = [tick for tick in (10.0**power for power in powers) if low <= tick <= high]
    fine = [tick for tick in (factor * 10.0**power for power in powers for factor in (1, 2, 5)) if low <= tick <= high]
    if len(fine) < 2:
        return [tick for tick in nice_ticks(low, high) if low <= tick <= high]
    return fine if len(fine) <= most else decades[:: -(-len(decades) // most)]


def colour_class(colour: int) -> str:
    """Return the CSS class of a colour number: 0 is neutral, the others wrap round the palette."""
    return f"c{(colour - 1) % COLOURS + 1 if colour else 0}"


def legend_list(series: Sequence[Series], marks: str = "") -> str:
    """Return the key to the colours as HTML; a single series needs none. Neutral series are always dashed.

    ``marks`` says what the vertical marks mean, if there are any.
    """
    if len(series) < 2 and not marks:
        return ""
    kinds = [colour_class(one.colour) + ("" if one.colour and not one.dashed else " dashed") for one in series]
    keys = "".join(f'<li class="{kind}">{escape(one.label)}</li>' for kind, one in zip(kinds, series, strict=True))
    keys += f'<li class="marked">{escape(marks)}</li>' if marks else ""
    return f'<ul class="legend">{keys}</ul>'


def _is_measured(point: Point) -> bool:
    return point.y is not None and math.isfinite(point.y)


def _height(point: Point) -> float:
    assert point.y is not None, "only for measured points"
    return point.y


def _frame(xs: Iterable[float], ys: Iterable[float], x_axis: Axis, y_axis: Axis) -> _Frame:
    across, up = list(xs), list(ys)
    ticks = nice_ticks(min(0.0, *up) if y_axis.from_zero else min(up), max(up))
    # The drawing ends a little above the data, not at the next tick, which may be far up.
    top = max(max(up) + 0.04 * (max(up) - ticks[0]), ticks[1])
    visible = [tick for tick in ticks if tick <= top]
    if x_axis.log:
        if min(across) <= 0:
            raise ValueError(f"expected numbers above 0 on the logarithmic axis {x_axis.label!r}, got {min(across)}")
        room = max((max(across) / min(across)) ** 0.03, 1.02)
        return _Frame(min(across) / room, max(across) * room, ticks[0], top, visible, x_log=True)
    if x_axis.whole:
        return _Frame(min(across) - 0.5, max(across) + 0.5, ticks[0], top, visible, x_log=False)
    return _Frame(0.0, max(across) * 1.03 or 1.0, ticks[0], top, visible, x_log=False)


def _axes(frame: _Frame, x_axis: Axis, y_axis: Axis) -> str:
    floor = HEIGHT - _BOTTOM
    parts = []
    for tick in frame.y_ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{WIDTH - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8:g}" y="{y + 4:.1f}" text-anchor="end">{escape(y_axis.show(tick))}</text>')
    low, high = frame.x_low, frame.x_high
    for tick in log_ticks(low, high) if x_axis.log else nice_ticks(low, high, whole=x_axis.whole):
        if low <= tick <= high:
            x = frame.x(tick)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{floor:g}" y2="{floor + 4:g}"/>')
            label = escape(x_axis.show(tick))
            parts.append(f'<text x="{x:.1f}" y="{floor + 18:g}" text-anchor="middle">{label}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<line class="axis" x1="{_LEFT:g}" x2="{WIDTH - _RIGHT:g}" y1="{floor:g}" y2="{floor:g}"/>')
    parts.append(f'<text x="{middle:g}" y="{HEIGHT - 4:g}" text-anchor="middle">{escape(x_axis.label)}</text>')
    return "".join(parts)


def _line(frame: _Frame, series: Series) -> str:
    """Draw solid lines between neighbours, dotted ones across a gap, and a dot where something was measured."""
    solid: list[str] = []
    bridges: list[str] = []
    dots: list[str] = []
    radius = 1.5 if len(series.points) > _MANY_POINTS else 3
    previous: str | None = None
    gap = False
    for point in series.points:
        if not _is_measured(point):
            gap = True
            continue
        x, y = frame.x(point.x), frame.y(_height(point))
        here = f"{x:.1f} {y:.1f}"
        if previous is not None:
            way = f"H{x:.1f}V{y:.1f}" if series.steps else f"L{here}"
            (bridges if gap else solid).append(f"M{previous}{way}")
        title = escape(f"{series.label}: {point.tip}")
        if point.error:
            low, high = (frame.y(_height(point) + sign * point.error) for sign in (-1, 1))
            dots.append(
                f'<path class="error" d="M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6m-6 {high - low:.1f}h6"/>'
            )
        dots.append(f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{title}</title></circle>')
        previous, gap = here, False
    lines = f'<path class="line" d="{"".join(solid)}"/>' if solid else ""
    lines += f'<path class="bridge" d="{"".join(bridges)}"/>' if bridges else ""
    return f'<g class="series {colour_class(series.colour)}">{lines}{"".join(dots)}</g>'


def _level(frame: _Frame, level: Series) -> str:
    """Draw a dashed step of one round's width per point, so that a single round shows it too."""
    path, previous = [], None
    for point in level.points:
        if not _is_measured(point):
            previous = None
            continue
        left, right, y = frame.x(point.x - 0.5), frame.x(point.x + 0.5), frame.y(_height(point))
        joined = previous == point.x - 1
        path.append(f"V{y:.1f}H{right:.1f}" if joined else f"M{left:.1f} {y:.1f}H{right:.1f}")
        previous = point.x
    title = escape(level.label)
    return f'<path class="level {colour_class(level.colour)}" d="{"".join(path)}"><title>{title}</title></path>'


def _bar(frame: _Frame, bar: Bar) -> str:
    left, right = frame.x(bar.x - _BAR_SHARE / 2), frame.x(bar.x + _BAR_SHARE / 2)
    rects, base = [], 0.0
    for colour, part in enumerate(bar.parts, start=1):
        bottom, top = frame.y(base), frame.y(base + part)
        base += part
        rects.append(
            f'<rect class="{colour_class(colour)}" x="{left:.1f}" y="{top:.2f}" width="{right - left:.2f}" '
            f'height="{bottom - top:.2f}"/>'
        )
    return f'<g class="bar"><title>{escape(bar.tip)}</title>{"".join(rects)}</g>'


def _marks(frame: _Frame, marks: Sequence[Point]) -> list[str]:
    spots = [(frame.x(mark.x), escape(mark.tip)) for mark in marks if frame.x_low <= mark.x <= frame.x_high]
    span = f'y1="{_TOP:g}" y2="{HEIGHT - _BOTTOM:g}"'
    return [f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" {span}><title>{tip}</title></line>' for x, tip in spots]


def _placeholder(alternative: str, message: str) -> str:
    middle = f'x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}" text-anchor="middle"'
    return _svg(f"{alternative} {message}.", f'<text class="empty" {middle}>{escape(message)}</text>')


def _svg(alternative: str, body: str) -> str:
    label = escape(alternative)
    # The page's CSS overrides width and height; a drawing that holds charts needs them.
    size = f'width="{WIDTH:g}" height="{HEIGHT:g}" viewBox="0 0 {WIDTH:g} {HEIGHT:g}"'
    return f'<svg class="chart" {size} role="img" aria-label="{label}">{body}</svg>'
