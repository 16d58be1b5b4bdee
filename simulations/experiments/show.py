"""What experiments found beside what the papers found."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from simulations.experiments.definition import Experiment, PaperValue, shipped
from simulations.experiments.metrics import METRICS, Metric
from simulations.experiments.results import Estimate, Results, estimate
from simulations.published_docs import markdown

_NONE = "-"
_WIDEST = 10_000
_FIXED = 5  # columns before those of the other metrics


@dataclass(frozen=True, slots=True)
class Line:
    """A case or a difference: the paper's value in the metric's unit, and ours for each metric."""

    name: str
    paper: PaperValue | None
    ours: dict[str, Estimate]
    is_difference: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """An experiment and where its results are; ``origin`` says it where they were not found here."""

    experiment: Experiment
    results: Results
    origin: str = ""


def lines_of(experiment: Experiment, results: Results) -> list[Line]:
    """Return one line for each case and each difference; a difference is taken seed by seed."""
    by_case = {case.name: results.of(experiment, case) for case in experiment.cases}
    lines = []
    for case in experiment.cases:
        ours = {}
        for metric in experiment.metrics:
            values = [one.figures[metric] for one in by_case[case.name].values() if metric in one.figures]
            if (found := estimate(values)) is not None:
                ours[metric] = found
        lines.append(Line(case.name, case.paper, ours))
    first = experiment.metrics[0]
    for difference in experiment.differences:
        of, minus = by_case[difference.of], by_case[difference.minus]
        pairs = [(of[seed].figures.get(first), minus[seed].figures.get(first)) for seed in of if seed in minus]
        values = [one - other for one, other in pairs if one is not None and other is not None]
        found = estimate(values)
        lines.append(Line(difference.name, difference.paper, {} if found is None else {first: found}, True))
    return lines


def show(shown: Sequence[Shown], command: Sequence[str], console: Console) -> None:
    """Print a table for each experiment, then one line for scripts for each case and each difference."""
    found = [(one.experiment, lines_of(one.experiment, one.results), one.origin) for one in shown]
    for experiment, lines, origin in found:
        _print_whole(_table(experiment, lines, origin), console)
        if experiment.notes:
            console.print(" ".join(experiment.notes.split()), style="dim", highlight=False)
        run = shlex.join([*command, experiment.name if experiment.path in shipped() else str(experiment.path)])
        console.print(f"command: {run}{' --quick' if experiment.quick else ''}\n", highlight=False, soft_wrap=True)
    for experiment, lines, _ in found:
        for line in lines:
            print(bar(experiment, line))


def _table(experiment: Experiment, lines: Sequence[Line], origin: str) -> Table:
    quick = " (a glance, not the paper's setting)" if experiment.quick else ""
    facts = [experiment.source, METRICS[experiment.metrics[0]].heading, *([origin] if origin else [])]
    title = f"{experiment.name}: {experiment.title}{quick}\n{'; '.join(facts)}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    rows = [_row(experiment, line) for line in lines]
    for number, heading in enumerate(_head(experiment)):
        # A heading may be broken between words, a figure nowhere.
        least = max(len(text) for text in [*heading.split(), *(row[number] for row in rows)])
        table.add_column(heading, justify="right" if number else "left", no_wrap=number < _FIXED, min_width=least)
    for line, row in zip(lines, rows, strict=True):
        table.add_row(*row, style="bold" if line.is_difference else "")
    return table


def _print_whole(table: Table, console: Console) -> None:
    """Print a table with all of its columns: wider than the console where it must be, rather than cut."""
    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(max_width=_WIDEST), table).minimum)
    try:
        console.print(table, crop=False)
    finally:
        console.width = width


def markdown_table(experiment: Experiment, results: Results) -> str:
    """Return the table as the documentation has it, or several where the definition says what their rows are."""
    lines = lines_of(experiment, results)
    head = [METRICS[experiment.metrics[0]].heading, *_head(experiment)[1:]]
    if experiment.rows is None:
        return markdown(head, (_row(experiment, line) for line in lines))
    differences = [_row(experiment, line) for line in lines if line.is_difference]
    tables = _tables_by_metric(experiment, experiment.rows, lines)
    return "\n\n".join([*tables, *([markdown(head, differences)] if differences else [])])


def _tables_by_metric(experiment: Experiment, axis: str, lines: Sequence[Line]) -> Iterator[str]:
    """Give a table for each metric: a row for each label of ``axis``, a column for each of the other axes' places."""
    places: dict[str, dict[str, Line]] = {}
    for case, line in zip(experiment.cases, lines, strict=False):  # the differences come after the cases
        place = " ".join(label for name, label in case.labels.items() if name != axis)
        places.setdefault(case.labels[axis], {})[place] = line
    columns = list(next(iter(places.values())))
    for number, name in enumerate(experiment.metrics):
        cells = {label: [found[place].ours.get(name) for place in columns] for label, found in places.items()}
        counts = {cell.seeds for row in cells.values() for cell in row if cell is not None}
        usual = max(counts, default=0)
        seeds = "" if usual == len(experiment.seeds) else f" ({usual} of {len(experiment.seeds)} seeds)"
        rows = [
            [label, *(_cell(cell, METRICS[name], usual, with_error=not number) for cell in row)]
            for label, row in cells.items()
        ]
        yield markdown([f"{METRICS[name].heading}{seeds}", *columns], rows)


def _cell(ours: Estimate | None, metric: Metric, usual: int, *, with_error: bool) -> str:
    """Return a figure, perhaps with its error; and how many seeds it has, where that is not the ``usual`` number."""
    if ours is None:
        return _NONE
    figure = _with_error(ours, metric, False) if with_error else metric.write(ours.mean)
    return figure if ours.seeds == usual else f"{figure} (seeds: {ours.seeds})"


def _head(experiment: Experiment) -> list[str]:
    return ["case", "paper", "ours", "difference", "seeds", *(METRICS[name].heading for name in experiment.metrics[1:])]


def _row(experiment: Experiment, line: Line) -> list[str]:
    first = METRICS[experiment.metrics[0]]
    ours = line.ours.get(experiment.metrics[0])
    return [
        line.name,
        _paper(line.paper, first, line.is_difference),
        _NONE if ours is None else _with_error(ours, first, line.is_difference),
        _NONE if ours is None or line.paper is None else _against(ours, line.paper, first),
        f"{ours.seeds if ours else 0}/{len(experiment.seeds)}",
        *(
            _NONE if metric not in line.ours else METRICS[metric].write(line.ours[metric].mean)
            for metric in experiment.metrics[1:]
        ),
    ]


def _paper(paper: PaperValue | None, metric: Metric, sign: bool) -> str:
    if paper is None:
        return _NONE
    error = "" if paper.sem is None else f" \N{PLUS-MINUS SIGN} {paper.sem:.{metric.decimals}f}"
    return f"{paper.value:{'+' if sign else ''}.{metric.decimals}f}{error}"


def _with_error(ours: Estimate, metric: Metric, sign: bool) -> str:
    error = "" if ours.sem is None else f" \N{PLUS-MINUS SIGN} {metric.write_error(ours.sem)}"
    return f"{metric.write(ours.mean, sign=sign)}{error}"


def _against(ours: Estimate, paper: PaperValue, metric: Metric) -> str:
    return f"{metric.scale * ours.mean - paper.value:+.{metric.decimals}f}"


def bar(experiment: Experiment, line: Line) -> str:
    """Return the line for scripts; figures in the paper's unit, ``none`` where there is none."""
    metric, ours = METRICS[experiment.metrics[0]], line.ours.get(experiment.metrics[0])
    figures = {
        "experiment": f"{experiment.name}/{line.name}",
        "paper": "none" if line.paper is None else f"{line.paper.value:g}",
        "ours": "none" if ours is None else metric.write(ours.mean),
        "sem": "none" if ours is None or ours.sem is None else metric.write_error(ours.sem),
        "seeds": str(ours.seeds if ours else 0),
    }
    return "BAR " + " ".join(f"{key}={value}" for key, value in figures.items())
