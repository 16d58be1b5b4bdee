"""The search of the communication benchmark: every candidate recipe, and which is best where."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from simulations.benchmarks.bytes_plan import PlannedRun, Setting
from simulations.benchmarks.bytes_recipes import Choice
from simulations.benchmarks.bytes_runs import RunFigures
from simulations.published_docs import markdown

Tried = dict[tuple[Setting, str], dict[str, float]]  # final accuracies by setting and kind, then by recipe


def accuracies(done: Sequence[tuple[PlannedRun, RunFigures]]) -> Tried:
    """Return the final accuracy of each candidate."""
    found: Tried = {}
    for run, figures in done:
        found.setdefault((run.setting, run.system.kind), {})[run.recipe] = figures.accuracy
    return found


def best_choices(found: Tried, candidates: Sequence[str]) -> list[Choice]:
    """Return the best candidate wherever all of them have been tried; of equals, the one that is listed first."""
    return [
        Choice(kind, setting.partition, setting.epsilon, best, round(by_recipe[best], 4))
        for (setting, kind), by_recipe in found.items()
        if by_recipe.keys() >= set(candidates)
        for best in [max(candidates, key=by_recipe.__getitem__)]
    ]


def search_table(found: Tried, candidates: Sequence[str]) -> Table:
    """Return the accuracies with the best of each column in bold."""
    table = Table(title="final accuracy (%)", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("recipe", no_wrap=True)
    for setting, kind in found:
        table.add_column(f"{setting.partition}\nepsilon {setting.epsilon:g}\n{kind}", justify="right", no_wrap=True)
    for row in _rows(found, candidates, "[bold]{}[/bold]"):
        table.add_row(*row)
    return table


def search_markdown(found: Tried, candidates: Sequence[str]) -> str:
    """Return the same for the documentation."""
    head = ["accuracy (%) with the recipe", *(f"{setting.title}, {kind}" for setting, kind in found)]
    return markdown(head, _rows(found, candidates, "**{}**"))


def _rows(found: Tried, candidates: Sequence[str], bold: str) -> list[list[str]]:
    return [[name, *(_entry(by_recipe, name, bold) for by_recipe in found.values())] for name in candidates]


def _entry(by_recipe: dict[str, float], name: str, bold: str) -> str:
    if name not in by_recipe:
        return "-"
    text = f"{100 * by_recipe[name]:.2f}"
    return bold.format(text) if by_recipe[name] == max(by_recipe.values()) else text
