"""``fedsieve experiments list|run|show``. Each loads what it needs only when it is called."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from common.errors import ConfigError, FedsieveError

if TYPE_CHECKING:
    from simulations.experiments.definition import Experiment

_COMMAND = ("fedsieve", "experiments", "run")


def add_experiments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommands."""
    parser = commands.add_parser("experiments", help="the papers' tables and figures, measured here")
    actions = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about, action in (
        ("list", "what there is, and what it would cost", _list),
        ("run", "carry out what is missing, then show", carry_out_and_show),
        ("show", "what was found, beside what the papers found", _show),
    ):
        one = actions.add_parser(name, help=about)
        one.add_argument("--quick", action="store_true", help="a glance: fewer seeds, smaller settings, own results")
        if name != "list":
            one.add_argument(
                "experiments", nargs="*", metavar="EXPERIMENT", help="name, or .toml file of your own (default: all)"
            )
            one.add_argument("--out", type=Path, default=Path("runs/experiments"), metavar="FOLDER")
        if name == "run":
            one.add_argument(
                "--only", nargs="+", default=[], metavar="WORD", help="cases with all words: eps3 'seed 1'"
            )
            one.add_argument("--jobs", type=int, default=0, metavar="N", help="cases at a time (default: one per CPU)")
            one.add_argument("--ray-address", metavar="ADDRESS", help="join this Ray cluster instead of starting one")
            one.add_argument("--in-process", action="store_true", help="no Ray: one case after the other, here")
        one.set_defaults(run=action)


def _list(options: argparse.Namespace) -> int:
    from simulations.experiments import definition
    from simulations.report import words

    for path in definition.shipped():
        try:
            one = definition.load(path, quick=options.quick)
        except ConfigError as error:
            print(f"{path.stem}: not available: {error}")
            continue
        # A glance is smaller than what 'minutes' speaks of; how much smaller, nobody knows.
        cost = "" if options.quick else f", about {words.duration(60 * one.total_minutes)} of one CPU core"
        print(f"{one.name}: {one.title} ({one.source}); {len(one.cases)} cases x {len(one.seeds)} seeds{cost}")
    return 0


def carry_out_and_show(options: argparse.Namespace, before_showing: Callable[[], None] = lambda: None) -> int:
    """Carry out what is missing of the chosen experiments, then show all of them."""
    from simulations.experiments.runner import Workers, carry_out, tasks_of

    if options.jobs < 0:
        raise ConfigError(f"expected --jobs of 0 or more, got {options.jobs}")
    console = Console()
    tasks = tasks_of(_chosen(options, console), options.only)
    if not tasks:
        raise ConfigError(f"no case has all of {', '.join(options.only)} in its name: see 'fedsieve experiments show'")
    workers = Workers(jobs=options.jobs, ray_address=options.ray_address, in_process=options.in_process)
    try:
        failures = carry_out(tasks, out_of(options), workers, console)
    except KeyboardInterrupt:
        console.print("stopped; what is done stays done: the same command goes on from here", highlight=False)
        return 130
    before_showing()
    _show(options)
    if failures:
        raise FedsieveError(
            "\n".join([f"{len(failures)} of {len(tasks)} runs failed; the same command tries again", *failures])
        )
    return 0


def _show(options: argparse.Namespace) -> int:
    from simulations.experiments.results import Results
    from simulations.experiments.runner import RESULTS
    from simulations.experiments.show import show

    console = Console()
    experiments = _chosen(options, console)
    with Results(out_of(options) / RESULTS) as results:
        show(experiments, results, _COMMAND, console)
    return 0


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
            console.print(f"left out: {error}", style="yellow", highlight=False, soft_wrap=True)
    return found
