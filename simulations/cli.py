"""The ``fedsieve`` command. Each subcommand loads what it needs only when it is called."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.config import ConfigValue, describe_keys, parse_assignment
from common.errors import ConfigError, FedsieveError
from deployment import cli as deploy_cli
from simulations import site_cli
from simulations.attacks.cli import add_attack
from simulations.experiments.cli import add_experiments

_SIMULATE_HELP = """\
Run a federated simulation on this machine and write its folder: run.jsonl, config.toml, checkpoint.npz, report.html.

examples:
  fedsieve simulate                                 what 'make demo' runs
  fedsieve simulate --method dense                  DP-SGD, for comparison; 'fedsieve methods' lists them all
  fedsieve simulate --suggest                       a density and clip norms to try, from a short probing run
  fedsieve simulate --no-dp --final-density 1 --set learning-rate=0.1      plain FedAvg: NOT private
  fedsieve simulate --sites 100 --cohort 20 --partition dirichlet:0.5 --epsilon 3
  fedsieve simulate --model my_package.models:net --dataset my_data.npz
  fedsieve simulate --set learning-rate=2 --set server-optimizer=momentum
  fedsieve simulate --resume runs/NAME              go on where a run was stopped
"""

# Options that are run-config keys under their own name.
_KEY_OPTIONS = (
    ("rounds", int),
    ("sites", int),
    ("cohort", int),
    ("dataset", str),
    ("model", str),
    ("method", str),
    ("partition", str),
    ("epsilon", float),
    ("final-density", float),
    ("seed", int),
    ("device", str),
    ("name", str),
    ("out", str),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        exit_code: int = options.run(options)
        return exit_code
    except FedsieveError as error:
        print(f"fedsieve: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedsieve", description="Federated learning whose every upload is differentially private and small."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_simulate(commands)
    report = commands.add_parser("report", help="write report.html of a run, or compare runs on one page")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, e.g. runs/NAME")
    report.add_argument(
        "--to", type=Path, metavar="FILE", help="where to write (default: report.html of the first run)"
    )
    report.set_defaults(run=_report)
    _add_watch(commands)
    data = commands.add_parser("data", help="get data sets").add_subparsers(required=True, metavar="COMMAND")
    get = data.add_parser("get", help="download a data set into the cache folder, with its SHA-256 checked")
    get.add_argument("dataset", help="fashion-mnist, mnist, or fashion-mnist-12k (which ships here)")
    get.add_argument("--source", metavar="URL|FOLDER", help="take the files from here instead of the data set's home")
    get.set_defaults(run=_data_get)
    methods = commands.add_parser("methods", help="list the methods: what each uploads, protects and costs")
    methods_commands = methods.add_subparsers(metavar="COMMAND")
    show = methods_commands.add_parser("show", help="explain one method")
    show.add_argument("name", metavar="NAME", help="as in --method")
    show.set_defaults(run=_methods_show)
    methods.set_defaults(run=_methods)
    site_cli.add_site(commands)
    site_cli.add_ledger(commands)
    deploy_cli.add_keys(commands)
    deploy_cli.add_deploy(commands)
    site_cli.add_audit(commands)
    add_experiments(commands)
    add_attack(commands)
    return parser


def _add_watch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    watch = commands.add_parser(
        "watch",
        help="follow a run in the browser while it goes on",
        description="Serve the report of a run on this machine alone and bring it up to date while the run goes on, "
        "simulated or deployed: all that is read is run.jsonl in its folder. Ctrl-C ends it; the run goes on.",
    )
    watch.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, e.g. runs/NAME; it may not exist yet"
    )
    watch.add_argument("--port", type=int, default=8420, help="port on 127.0.0.1 (default 8420; 0: any free one)")
    watch.set_defaults(run=_watch)


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    about = describe_keys()
    width = max(map(len, about))
    keys = "\n".join(f"  {key.ljust(width)}  {text}" for key, text in about.items())
    simulate = commands.add_parser(
        "simulate",
        help="run a federated simulation",
        description=_SIMULATE_HELP,
        epilog=f"keys for --set (defaults in pyproject.toml):\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for key, kind in _KEY_OPTIONS:
        simulate.add_argument(f"--{key}", type=kind, default=None, metavar=kind.__name__.upper(), help=about[key])
    simulate.add_argument("--no-dp", action="store_true", help="no clipping, no noise: NOT private, and labelled so")
    simulate.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the run config")
    simulate.add_argument("--resume", type=Path, metavar="RUN", help="continue the stopped run in this folder")
    simulate.add_argument("--actors", type=int, default=0, help="Ray actors (default: one per CPU)")
    simulate.add_argument("--gpus-per-actor", type=float, default=0.0, help="GPUs of an actor, e.g. 0.25")
    simulate.add_argument("--ray-address", metavar="ADDRESS", help="join this Ray cluster instead of starting one")
    simulate.add_argument(
        "--suggest",
        action="store_true",
        help="run nothing: print a density and clip norms to try, and what they assume",
    )
    simulate.add_argument(
        "--probe", metavar="DATASET", help="public data for the probing run of --suggest (default: synthetic data)"
    )
    simulate.add_argument("--in-process", action="store_true", help="no Ray: all sites in this process, for debugging")
    simulate.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from simulations.progress import RunDisplay
    from simulations.report import write_report
    from simulations.run import Engine, config_of_run, config_with, defaults, simulate

    changes: dict[str, ConfigValue] = {}
    for assignment in options.set:
        key, value = parse_assignment(assignment, defaults())
        changes[key] = value
    given = {key: getattr(options, key.replace("-", "_")) for key, _ in _KEY_OPTIONS}
    changes |= {key: value for key, value in given.items() if value is not None}
    if options.no_dp:
        changes["private"] = False
    if options.resume is not None:
        if changes:
            raise ConfigError(f"a resumed run keeps its config: leave out {', '.join(sorted(changes))}")
        config = config_of_run(options.resume)
    else:
        config = config_with(changes)
    if options.suggest:
        from simulations.suggest import suggest

        print(suggest(config, options.probe))
        return 0
    if options.probe is not None:
        raise ConfigError(f"--probe {options.probe} names the data of a probing run: it goes with --suggest")
    engine = Engine(
        actors=options.actors,
        gpus_per_actor=options.gpus_per_actor,
        ray_address=options.ray_address,
        in_process=options.in_process,
    )
    with RunDisplay(config) as display:
        try:
            result = simulate(config, engine, (display.show,))
        except KeyboardInterrupt:
            display.interrupted()
            return 130
    report = write_report([result.folder], result.folder / "report.html")
    display.finished(result, report)
    return 0


def _methods(options: argparse.Namespace) -> int:
    from simulations.methods_page import print_table

    print_table()
    return 0


def _methods_show(options: argparse.Namespace) -> int:
    from simulations.methods_page import print_method

    print_method(options.name)
    return 0


def _report(options: argparse.Namespace) -> int:
    from simulations.report import write_report

    print(write_report(options.runs, options.to or options.runs[0] / "report.html"))
    return 0


def _watch(options: argparse.Namespace) -> int:
    from simulations.report.live import serve

    return serve(options.runs, options.port)


def _data_get(options: argparse.Namespace) -> int:
    from simulations.datasets import get

    print(f"{options.dataset} is ready in {get(options.dataset, options.source)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
