"""Charts: ticks, points, steps and bars lie where their values are."""

import re

import pytest

from simulations.report.charts import Chart
from simulations.report.poster import poster
from simulations.report.svg import Axis, Bar, Point, Series, line_chart, log_ticks, nice_ticks, stacked_bars


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 8, [0, 2, 4, 6, 8]), (0.351, 0.802, [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]), (5, 5, [5, 6]), (0, 0, [0, 0.2])],
)
def test_ticks_are_round_and_enclose_the_data(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_ticks_of_rounds_are_whole() -> None:
    assert nice_ticks(0.5, 1.5, whole=True) == [0, 1, 2]


def test_points_lie_where_their_values_are() -> None:
    axis = Axis("v", lambda value: f"{value:g}")
    points = [Point(0, 0.0, ""), Point(1, 5.0, ""), Point(2, 10.0, ""), Point(3, None, "")]
    drawing = line_chart("a", [Series("s", points, 1)], Axis("round", str, whole=True), axis)
    across = [float(x) for x in re.findall(r'cx="([\d.]+)"', drawing)]
    down = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawing)]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2) and across[0] < across[1]
    assert down[0] - down[1] == pytest.approx(down[1] - down[2], abs=0.2) and down[2] < down[1]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (80, 3000, [100, 200, 500, 1000, 2000]),
        (1, 10, [1, 2, 5, 10]),
        (3, 3e4, [10, 100, 1000, 10_000]),
        (0.5, 2e9, [1, 100, 10_000, 1e6, 1e8]),
        (2.5, 4.5, [2.5, 3, 3.5, 4, 4.5]),
        (6, 9, [6, 7, 8, 9]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_round_and_few(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(ticks)


def test_equal_ratios_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    axis = Axis("v", lambda value: f"{value:g}")
    points = [Point(x, 1.0, "") for x in (20.0, 200.0, 2000.0)]
    drawing = line_chart("a", [Series("s", points, 1)], Axis("bytes", "{:g}".format, log=True), axis)
    across = [float(x) for x in re.findall(r'cx="([\d.]+)"', drawing)]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2) and 62 < across[0] < 80
    assert [label in drawing for label in (">20<", ">200<", ">2000<")] == [True, True, True]
    one_point = line_chart("a", [Series("s", points[:1], 1)], Axis("bytes", "{:g}".format, log=True), axis)
    assert one_point.count("<circle") == 1 and ">20<" in one_point
    with pytest.raises(ValueError, match="above 0 on the logarithmic axis 'bytes', got 0"):
        line_chart("a", [Series("s", [Point(0, 1.0, "")], 1)], Axis("bytes", str, log=True), axis)


def test_steps_stay_level_up_to_the_next_point() -> None:
    axis = Axis("v", lambda value: f"{value:g}")
    points = [Point(1, 1.0, ""), Point(2, 3.0, "")]
    drawing = line_chart("a", [Series("s", points, 1, steps=True)], Axis("x", str), axis)
    (path,) = re.findall(r'class="line" d="([^"]+)"', drawing)
    assert re.fullmatch(r"M[\d.]+ [\d.]+H[\d.]+V[\d.]+", path)


def test_gaps_are_bridged_and_errors_go_as_far_up_as_down() -> None:
    axis = Axis("v", lambda value: f"{value:g}")
    points = [Point(1, 1.0, ""), Point(2, None, ""), Point(3, 3.0, "", error=0.5), Point(4, 2.0, "")]
    drawing = line_chart("a", [Series("s", points, 1)], Axis("x", str), axis)
    first, third, fourth = (f"{x} {y}" for x, y in re.findall(r'class="point" cx="([\d.]+)" cy="([\d.]+)"', drawing))
    assert re.findall(r'class="bridge" d="([^"]+)"', drawing) == [f"M{first}L{third}"]
    assert re.findall(r'class="line" d="([^"]+)"', drawing) == [f"M{third}L{fourth}"]
    ((low, high),) = re.findall(r'class="error" d="M[\d.]+ ([\d.]+)V([\d.]+)M', drawing)
    one, three = (float(place.split()[1]) for place in (first, third))
    assert float(low) - three == pytest.approx(three - float(high), abs=0.11)
    assert float(low) - three == pytest.approx((one - three) / 4, abs=0.11)


def test_parts_of_a_bar_stand_on_each_other_in_proportion() -> None:
    axis = Axis("v", lambda value: f"{value:g}")
    drawing = stacked_bars("a", [Bar(1, (30, 10), "tip")], Axis("round", str, whole=True), axis)
    (low_y, low_height), (high_y, high_height) = [
        (float(y), float(height))
        for y, height in re.findall(r'<rect[^>]* y="([\d.]+)"[^>]* height="([\d.]+)"', drawing)
    ]
    assert low_height == pytest.approx(3 * high_height, abs=0.05)
    assert high_y + high_height == pytest.approx(low_y, abs=0.02)


def test_the_key_of_a_poster_names_the_series_of_all_panels_and_cuts_none() -> None:
    def chart(*labels: str) -> Chart:
        series = [Series(label, [Point(1, 2.0, "")], colour) for colour, label in enumerate(labels, start=1)]
        return Chart("t", "", line_chart("", series, Axis("x", str), Axis("y", str)), series)

    drawn = poster("title", "note", [chart("a"), chart("a", "b")])
    assert re.findall(r'class="note"[^>]*>([ab])<', drawn) == ["a", "b"]
    for length, columns in ((10, 3), (19, 3), (20, 2), (30, 2), (50, 1)):
        drawn = poster("title", "note", [chart(*("xyz"[n] * length for n in range(3)))])
        places = set(re.findall(r'class="note" x="([\d.]+)"[^>]*>(?:x+|y+|z+)<', drawn))
        assert len(places) == columns, length
        assert max(map(float, places)) + 7 * length <= 500, "the drawing is 500 wide"
