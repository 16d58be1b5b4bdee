"""``fedsieve attack inversion|linear``: the experiment of that name, and a page with its pictures."""

import argparse
from pathlib import Path

from simulations.experiments.cli import carry_out_and_show, out_of

_ATTACKS = {
    "inversion": "find pictures by matching gradients (Geiping et al. 2020)",
    "linear": "solve for the inputs of a linear layer, and compare with the bound on the error",
}


def add_attack(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommands."""
    parser = commands.add_parser("attack", help="attack what sites upload, and see what it shows")
    actions = parser.add_subparsers(required=True, metavar="ATTACK")
    for name, about in _ATTACKS.items():
        one = actions.add_parser(name, help=about)
        one.add_argument("--quick", action="store_true", help="a glance: fewer pictures and seeds, own results")
        one.add_argument(
            "--out", type=Path, default=Path("runs/experiments"), metavar="FOLDER", help="where results are kept"
        )
        one.add_argument("--jobs", type=int, default=0, metavar="N", help="attacks at a time (default: one per CPU)")
        one.add_argument("--ray-address", metavar="ADDRESS", help="join this Ray cluster instead of starting one")
        one.add_argument("--in-process", action="store_true", help="no Ray: one after the other, here")
        one.set_defaults(run=_attack, experiments=[name], only=[], published=False)


def _attack(options: argparse.Namespace) -> int:
    from simulations.attacks.page import write_page
    from simulations.experiments.definition import find, load
    from simulations.experiments.results import Results
    from simulations.experiments.runner import RESULTS

    def page() -> None:
        experiment, out = load(find(options.experiments[0]), quick=options.quick), out_of(options)
        destination = out / experiment.name / f"{experiment.name}.html"
        with Results(out / RESULTS) as results:
            write_page(experiment, results, out, destination)
        print(f"page with the pictures: {destination}")

    return carry_out_and_show(options, before_showing=page)
