"""The figure of an experiment, as an SVG file: its first metric along a setting, or the histograms of masks."""

from collections.abc import Sequence

from simulations.experiments import masks
from simulations.experiments.definition import Case, ChartPlan, Experiment
from simulations.experiments.metrics import METRICS, Metric
from simulations.experiments.results import Results, estimate
from simulations.report.charts import Chart
from simulations.report.poster import poster
from simulations.report.svg import Axis, Point, Series, in_words, line_chart

_SMALL_SPAN = 0.5  # what lies within the upper half of its scale is shown without the lower half


def drawing(experiment: Experiment, results: Results) -> str | None:
    """Return the figure; None where the definition asks for none, or nothing was measured."""
    if experiment.chart is None:
        by_case = {
            case.name: [one.figures for one in results.of(experiment, case).values()] for case in experiment.cases
        }
        return masks.drawing(by_case)
    if not any(results.of(experiment, case) for case in experiment.cases):
        return None
    charts = [
        _panel(experiment, experiment.chart, cases, results, title)
        for title, cases in _grouped(experiment.cases, [experiment.chart.panels] if experiment.chart.panels else [])
    ]
    return poster(experiment.title, f"{experiment.source}. Means and standard errors over the seeds.", charts)


def measured_point(experiment: Experiment, case: Case, metric: str, x: str, results: Results) -> Point:
    """Return what the seeds of a case gave, in the metric's unit, at the place of its setting ``x``."""
    place = float(case.settings[x])
    found = estimate([one.figures[metric] for one in results.of(experiment, case).values() if metric in one.figures])
    if found is None:
        return Point(place, None, f"not measured at {x} {place:g}")
    unit: Metric = METRICS[metric]
    error = f" \N{PLUS-MINUS SIGN} {unit.write_error(found.sem)}" if found.sem else ""
    tip = f"{unit.write(found.mean)}{error} at {x} {place:g}"
    return Point(place, unit.scale * found.mean, tip, unit.scale * (found.sem or 0.0))


def _panel(experiment: Experiment, plan: ChartPlan, cases: Sequence[Case], results: Results, title: str) -> Chart:
    name = experiment.metrics[0]
    unit = METRICS[name]
    others = [axis for axis in cases[0].labels if axis not in (plan.axis, plan.panels)]
    series = []
    for colour, (label, line) in enumerate(_grouped(cases, others), start=1):
        points = [measured_point(experiment, case, name, plan.x, results) for case in line]
        series.append(Series(label or unit.heading, sorted(points, key=lambda point: point.x), colour))

    def show(value: float) -> str:
        return f"{value:.{unit.decimals}f}"

    papers = sorted({(float(case.settings[plan.x]), case.paper.value) for case in cases if case.paper is not None})
    if len(papers) == len({x for x, _ in papers}) > 1:  # one line can show them
        series.append(Series("paper", [Point(x, value, f"{show(value)} at {plan.x} {x:g}") for x, value in papers], 0))
    heights = [point.y for one in series for point in one.points if point.y is not None]
    from_zero = not heights or min(heights) < _SMALL_SPAN * max(heights)

    axes = Axis(plan.x.replace("-", " "), "{:g}".format), Axis(unit.heading, "{:g}".format, from_zero=from_zero)
    alternative = " ".join([f"{unit.heading} by {plan.x}.", *(in_words(one, show) for one in series)])
    return Chart(title or unit.heading, "", line_chart(alternative, series, *axes), series)


def _grouped(cases: Sequence[Case], axes: Sequence[str]) -> list[tuple[str, list[Case]]]:
    """Return the cases by their labels on some axes, joined, in the order of the definition."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(" ".join(case.labels[axis] for axis in axes), []).append(case)
    return list(groups.items())
