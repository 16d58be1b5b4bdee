"""``fedsieve experiments list|run|show|publish``. Each loads what it needs only when it is called."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from common.errors import ConfigError, FedsieveError

if TYPE_CHECKING:
    from simulations.experiments.definition import Experiment
    from simulations.experiments.results import Results

_COMMAND = ("fedsieve", "experiments", "run")


def add_experiments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommands."""
    parser = commands.add_parser("experiments", help="the papers' tables and figures, measured here")
    actions = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about, action in (
        ("list", "what there is, and what it would cost", _list),
        ("run", "carry out what is missing, then show", carry_out_and_show),
        ("show", "what was found, beside what the papers found", _show),
        ("publish", "write what was found into the files that come with Fedsieve", _publish),
    ):
        one = actions.add_parser(name, help=about)
        if name != "publish":
            one.add_argument(
                "--quick", action="store_true", help="a glance: fewer seeds, smaller settings, own results"
            )
        if name in ("run", "show"):
            what = "count the results" if name == "run" else "show those"
            one.add_argument("--published", action="store_true", help=f"{what} that come with Fedsieve")
        if name != "list":
            one.add_argument(
                "experiments", nargs="*", metavar="EXPERIMENT", help="name, or .toml file of your own (default: all)"
            )
            one.add_argument(
                "--out", type=Path, default=Path("runs/experiments"), metavar="FOLDER", help="where results are kept"
            )
        if name == "run":
            one.add_argument(
                "--only", nargs="+", default=[], metavar="WORD", help="cases with all words: eps3 'seed 1'"
            )
            one.add_argument("--jobs", type=int, default=0, metavar="N", help="cases at a time (default: one per CPU)")
            one.add_argument("--ray-address", metavar="ADDRESS", help="join this Ray cluster instead of starting one")
            one.add_argument("--in-process", action="store_true", help="no Ray: one case after the other, here")
        one.set_defaults(run=action, **({"quick": False} if name == "publish" else {}))


def _list(options: argparse.Namespace) -> int:
    from rich.markup import escape
    from rich.table import Table

    from simulations.experiments import definition
    from simulations.report import words

    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for path in definition.shipped():
        try:
            one = definition.load(path, quick=options.quick)
        except ConfigError as error:
            table.add_row(path.stem, f"not available: {escape(str(error))}\n")
            continue
        size = f"{_counted(len(one.cases), 'case')} x {_counted(len(one.seeds), 'seed')}"
        # A glance is smaller than what 'minutes' speaks of; how much smaller, nobody knows.
        cost = "" if options.quick else f", about {words.duration(60 * one.total_minutes)} of one CPU core"
        table.add_row(one.name, f"{escape(one.title)}\n[dim]{size}{cost}; {escape(one.source)}[/dim]\n")
    Console().print(table, highlight=False)
    return 0


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def carry_out_and_show(options: argparse.Namespace, before_showing: Callable[[], None] = lambda: None) -> int:
    """Carry out what is missing of the chosen experiments, then show all of them."""
    from simulations.crew import Workers
    from simulations.experiments.published import published_results
    from simulations.experiments.results import Results
    from simulations.experiments.runner import RESULTS, carry_out, tasks_of
    from simulations.experiments.show import Shown, show

    if options.jobs < 0:
        raise ConfigError(f"expected --jobs of 0 or more, got {options.jobs}")
    console = Console()
    experiments = _chosen(options, console)
    tasks = tasks_of(experiments, options.only)
    if not tasks:
        raise ConfigError(f"no case has all of {', '.join(options.only)} in its name: see 'fedsieve experiments show'")
    workers = Workers(jobs=options.jobs, ray_address=options.ray_address, in_process=options.in_process)
    with (
        published_results(experiments if options.published else ()) as published,
        Results(out_of(options) / RESULTS, published) as results,
    ):
        try:
            failures = carry_out(tasks, out_of(options), results, workers, console)
        except KeyboardInterrupt:
            console.print("stopped; what is done stays done: the same command goes on from here", highlight=False)
            return 130
        before_showing()
        for experiment in experiments:
            if (drawn := _draw(experiment, results, out_of(options))) is not None:
                console.print(f"{experiment.name}: drawn in {drawn}", highlight=False, soft_wrap=True)
        show([Shown(experiment, results) for experiment in experiments], _COMMAND, console)
    if failures:
        raise FedsieveError(
            "\n".join([f"{len(failures)} of {len(tasks)} runs failed; the same command tries again", *failures])
        )
    return 0


def _show(options: argparse.Namespace) -> int:
    """Show what was found here; of experiments that were not carried out here, what was published."""
    from simulations.experiments.published import published_results
    from simulations.experiments.results import Results
    from simulations.experiments.runner import RESULTS
    from simulations.experiments.show import Shown, show

    console = Console()
    experiments = _chosen(options, console)
    path = out_of(options) / RESULTS
    with published_results(experiments) as published, Results(path if path.exists() else None) as own:
        theirs = [one for one in experiments if published.any_of(one) and (options.published or not own.any_of(one))]
        shown = [
            Shown(one, published, "published results") if one in theirs else Shown(one, own) for one in experiments
        ]
        show(shown, _COMMAND, console)
    return 0


def _publish(options: argparse.Namespace) -> int:
    from simulations import published_docs
    from simulations.experiments.published import publish, published_results
    from simulations.experiments.results import Results
    from simulations.experiments.runner import RESULTS
    from simulations.experiments.show import markdown_table

    experiments = _chosen(options, Console())
    # What was published stays so, as long as its definition does.
    with published_results(experiments) as published, Results(out_of(options) / RESULTS, published) as results:
        for experiment in experiments:
            path = publish(experiment, results)
            changed = published_docs.write({experiment.name: markdown_table(experiment, results)})
            if (drawn := _draw(experiment, results, published_docs.DOCS)) is not None:
                changed.append(drawn)
            print(f"{experiment.name}: {', '.join(map(str, [path or 'nothing was found yet', *changed]))}")
    return 0


def _draw(experiment: "Experiment", results: "Results", folder: Path) -> Path | None:
    """Draw what an experiment found, where there is a drawing of its kind; returns the file."""
    from simulations.experiments.drawing import drawing

    drawn = drawing(experiment, results)
    if drawn is None:
        return None
    path = folder / f"{experiment.name}.svg"
    path.write_text(drawn, encoding="utf-8")
    return path


def out_of(options: argparse.Namespace) -> Path:
    """Return the folder of the results."""
    out: Path = options.out
    return out / "quick" if options.quick else out


def _chosen(options: argparse.Namespace, console: Console) -> "list[Experiment]":
    """Return the named experiments; without names, all that this version of Fedsieve can carry out."""
    from simulations.experiments import definition

    if options.experiments:
        return [definition.load(definition.find(name), quick=options.quick) for name in options.experiments]
    found = []
    for path in definition.shipped():
        try:
            found.append(definition.load(path, quick=options.quick))
        except ConfigError as error:
            console.print(f"left out: {error}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    return found
