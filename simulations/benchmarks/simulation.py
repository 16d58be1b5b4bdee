"""What a round costs on our Ray engine, against a bare loop and against Flower's engine doing the same work.

``python -m simulations.benchmarks.simulation [--repeats N] [--rounds N] [--sites N] [--quick]``

Two cases. ``training`` has the shape of pfl-research's benchmark: 1,000 sites of 50 pictures, cohorts of 50, one local
epoch in batches of 10, a CNN of 1.6 million parameters. ``overhead`` asks 1,000 sites for next to nothing: what is left
is the engine. Nothing is private here, since the cost of clipping each record would hide that of the engine.

Every engine runs in processes of its own, and all of them must end with the same models. They take turns, a round each,
so that whatever else the machine does falls on all alike; a ratio is the median over the rounds of each round's ratio.
Costs are those of the whole tree of processes, without start-up and without the first round.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common import datasets, models
from common.coding import Values
from common.config import ConfigValue, RunConfig
from common.datasets import Dataset
from common.errors import FedsieveError
from server.federation import Member, draw_cohort
from server.runlog import Event
from simulations.partition import split
from simulations.ray_grid import start_ray
from simulations.run import Engine, config_with, simulate
from simulations.seeded import SeededRandomness

_HERE = "simulations.benchmarks.simulation"
_PROJECT = Path(__file__).resolve().parents[2]
_RESULT = Path("runs/benchmarks/simulation.json")
_TOLERANCE = 1e-4  # between the final models of two engines, which round differently
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}
_SITES_VARIABLE = "FEDSIEVE_BENCHMARK_SITES"  # engines' own processes make the data too, and inherit nothing else
_SITES = int(os.environ.get(_SITES_VARIABLE, "1000"))
_COHORT = 50
_CASES: dict[str, dict[str, ConfigValue]] = {
    "training": {
        "dataset": f"{_HERE}:pictures",
        "model": f"{_HERE}:cnn",
        "cohort": min(_COHORT, _SITES),
        "sampling-rate": 0.2,
    },
    "overhead": {"dataset": f"{_HERE}:points", "model": "linear:4-2", "cohort": 0, "sampling-rate": 1.0},
}
_STEPS = {"training": 5, "overhead": 1}
# Who takes turns with whom, at which cases. Flower's engine stays apart: it polls its nodes even while it has nothing
# to do.
_TABLES = ((("bare loop", "ours"), ("training", "overhead")), (("Flower",), ("training",)))


def cnn() -> nn.Module:
    """The CNN of pfl-research's CIFAR-10 benchmark without its dropout: 1,626,442 parameters."""
    convolutions = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolutions, nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10))


def pictures() -> Dataset:
    """Random pictures of CIFAR-10's size, 50 a site."""
    rng = np.random.default_rng(1)
    inputs, targets = rng.integers(0, 256, (50 * _SITES, 3, 32, 32), np.uint8), rng.integers(0, 10, 50 * _SITES)
    return Dataset(inputs, targets, inputs[:1], targets[:1])


def points() -> Dataset:
    """Random points, 2 a site."""
    rng = np.random.default_rng(1)
    inputs, targets = rng.standard_normal((2 * _SITES, 4), np.float32), rng.integers(0, 2, 2 * _SITES)
    return Dataset(inputs, targets, inputs[:1], targets[:1])


RoundDone = Callable[[], None]


def play_bare_loop(config: RunConfig, round_done: RoundDone) -> Values:
    """Train the same cohorts on the same batches with nothing but torch, in one thread."""
    torch.set_num_threads(1)
    dataset = datasets.load(config.dataset)
    shares = split(dataset.train_targets, config.sites, config.partition, config.seed)
    members = [Member(site, site, share.size, simulated=True) for site, share in enumerate(shares)]
    current = torch.from_numpy(models.initial_vector(config.model, config.seed))
    model = models.build(config.model)
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate)
    for round_number in range(1, config.rounds + 1):
        total = torch.zeros_like(current)
        cohort = draw_cohort(members, config.seed, round_number, config.cohort_size)
        for member in cohort:
            vector_to_parameters(current.clone(), model.parameters())
            randomness = SeededRandomness(config.seed, member.site).for_round(config.name, round_number)
            randomness.module_seed()  # a site draws it before its batches
            for _ in range(config.steps_per_round):
                rows = shares[member.site][randomness.poisson_sample(member.declared_size, config.sampling_rate)]
                inputs = torch.from_numpy(datasets.as_floats(dataset.train_inputs[rows]))
                targets = torch.from_numpy(dataset.train_targets[rows])
                loss = F.cross_entropy(model(inputs), targets, reduction="sum")
                optimizer.zero_grad()
                (loss / (config.sampling_rate * member.declared_size)).backward()
                optimizer.step()
            total += parameters_to_vector(model.parameters()).detach() - current
        current = current + total / len(cohort)
        round_done()
    return current.numpy()


def play_ours(config: RunConfig, round_done: RoundDone) -> Values:
    """Do what ``fedsieve simulate`` does."""
    start_ray("local")  # once for all cases
    return simulate(config, Engine(), (_at_end_of_round(round_done),)).model


def play_flower(config: RunConfig, round_done: RoundDone) -> Values:
    """Run the same server code and the same ClientApp on Flower's simulation engine, with an actor per CPU."""
    from flwr.app import Context
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.constant import NOOP_FEDERATION_ID
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supercore.telemetry import EventType

    from server.app import run as run_server

    server_app = ServerApp()
    final: list[Values] = []

    def join(grid: Grid, sites: int, timeout: float) -> list[Member]:
        """Name the members without asking all nodes who they are, which alone takes minutes on this engine."""
        while len(list(grid.get_node_ids())) < sites:
            time.sleep(0.1)
        # Flower numbers its partitions in the order in which it made the nodes.
        return [Member(site, node, declared_size=1, simulated=True) for site, node in enumerate(grid.state.nodes)]  # type: ignore[attr-defined]

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        with mock.patch("server.app.join", join):
            final.append(run_server(grid, config, (_at_end_of_round(round_done),)).model)

    run = Run.create_empty(run_id=1)
    run.primary_task_id, run.federation_id, run.override_config = 1, NOOP_FEDERATION_ID, config.to_mapping()
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
    _run_simulation(
        num_supernodes=config.sites,
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app_attr="client.app:app",
        server_app=server_app,
        # By itself Flower's engine joins any Ray that was noted on this machine: its processes would make other data.
        backend_config={
            "init_args": {"address": "local"},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
        app_dir=str(_PROJECT),
        run=run,
        is_app=True,
    )
    return final[0]


def _at_end_of_round(round_done: RoundDone) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if event["event"] == "round":
            if event["rejections"]:
                raise FedsieveError(f"round {event['round']}: rejected {event['rejections']}")
            round_done()

    return listen


_ENGINES: dict[str, Callable[[RunConfig, RoundDone], Values]] = {
    "bare loop": play_bare_loop,
    "ours": play_ours,
    "Flower": play_flower,
}


def tree_cpu_seconds() -> float:
    """Return the CPU time of this process and of all that it started, directly or not, ended and reaped ones too."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended while we were looking
            continue
        pid = int(entry.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))  # user and system time, its own and that of children it has reaped
    tree = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sum(ticks[pid] for pid in tree) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a round cost."""

    cpu: float
    seconds: float


def _play(engine: str, cases: Sequence[str], rounds: int, folder: Path) -> None:
    """Play cases in this process: after each round say what it cost, then wait for a line on stdin."""
    began = (0.0, 0.0)

    def round_done() -> None:
        nonlocal began
        cost = Cost(tree_cpu_seconds() - began[0], time.perf_counter() - began[1])
        print(json.dumps({"cost": asdict(cost)}), flush=True)
        sys.stdin.readline()
        began = (tree_cpu_seconds(), time.perf_counter())

    for case in cases:
        shape = {**_CASES[case], "steps-per-round": _STEPS[case], "sites": _SITES, "rounds": 1 + rounds}
        plain = {"private": False, "final-density": 1.0, "learning-rate": 0.05, "evaluate-every": 0, "device": "cpu"}
        exact = {"value-coding": "f32", "downlink-coding": "f32"}  # all engines must end with the same model
        config = config_with({**shape, **plain, **exact, "name": case, "out": str(folder)})
        np.save(folder / f"{case}.npy", _ENGINES[engine](config, round_done))


class Player:
    """An engine in a process of its own, which plays a round of the cases, one after another, whenever it is told to.

    The first round of each case is played untold, and does not count.
    """

    def __init__(self, engine: str, cases: Sequence[str], rounds: int, sites: int, stack: ExitStack) -> None:
        """Start it."""
        self.engine = engine
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedsieve-")))
        errors = stack.enter_context((self._folder / "errors").open("w"))
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _HERE, "--rounds", str(rounds), "--play", engine, str(self._folder), *cases],
            env={**environment, **_QUIET, _SITES_VARIABLE: str(sites)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        stack.callback(self._process.kill)

    def wait(self) -> Cost:
        """Wait until it has played a round, and return what that cost."""
        assert self._process.stdout is not None
        for line in self._process.stdout:  # Flower and Ray print there too
            if line.startswith('{"cost"'):
                return Cost(**json.loads(line)["cost"])
        raise self._failure()

    def go_on(self) -> None:
        """Let it play the next round, or the first one of the next case."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def finish(self) -> None:
        """Let it end."""
        self._process.communicate()
        if self._process.returncode:
            raise self._failure()

    def model(self, case: str) -> Values:
        """Return the final model of a case, once it has ended."""
        model: Values = np.load(self._folder / f"{case}.npy")
        return model

    def _failure(self) -> FedsieveError:
        return FedsieveError(f"{self.engine} failed:\n{(self._folder / 'errors').read_text()[-3000:]}")


Costs = dict[tuple[str, str], list[Cost]]


def measure(repeats: int, rounds: int, sites: int, say: Callable[[str], None]) -> Costs:
    """Return what each round of each engine at each case cost; fail where two engines did not do the same work."""
    costs: Costs = {(case, engine): [] for engines, cases in _TABLES for case in cases for engine in engines}
    expected: dict[str, Values] = {}
    for repeat in range(1, repeats + 1):
        for engines, cases in _TABLES:
            with ExitStack() as stack:
                players = [Player(engine, cases, rounds, sites, stack) for engine in engines]
                for case in cases:
                    for player in players:  # all of them, so that nobody plays while another one's round counts
                        player.wait()
                    for player in players * rounds:
                        player.go_on()
                        cost = player.wait()
                        costs[case, player.engine].append(cost)
                        say(f"{repeat}/{repeats} {case}, {player.engine}: {cost.cpu:.2f} CPU s, {cost.seconds:.2f} s")
                    if case != cases[-1]:
                        for player in players:
                            player.go_on()
                for player in players:
                    player.finish()
                    for case in cases:
                        model = player.model(case)
                        apart = float(np.abs(model - expected.setdefault(case, model)).max())  # NaN must fail too
                        if not apart <= _TOLERANCE:
                            raise FedsieveError(f"{case}: {player.engine} and {_TABLES[0][0][0]} end {apart:g} apart")
    return costs


def _ratio(costs: Costs, engine: str, other: str, what: str) -> float:
    pairs = zip(costs["training", engine], costs["training", other], strict=True)
    return statistics.median(getattr(one, what) / getattr(two, what) for one, two in pairs)


def _report(costs: Costs, settings: dict[str, int], console: Console) -> None:
    pairs = zip(costs["overhead", "ours"], costs["overhead", "bare loop"], strict=True)
    bars = {
        "cpu_vs_bare_loop": _ratio(costs, "ours", "bare loop", "cpu"),
        "cpu_vs_flower": _ratio(costs, "Flower", "ours", "cpu"),
        "overhead_ms_per_site": statistics.median(ours.seconds - bare.seconds for ours, bare in pairs)
        * (1000 / settings["sites"]),
    }
    table = Table("case", "engine", "CPU s / round", "s / round", "CPU / bare loop", "time / bare loop")
    for case, engine in costs:
        medians = [
            statistics.median(getattr(cost, what) for cost in costs[case, engine]) for what in ("cpu", "seconds")
        ]
        ratios = [_ratio(costs, engine, "bare loop", what) for what in ("cpu", "seconds")] if case == "training" else []
        table.add_row(case, engine, *(f"{median:.2f}" for median in medians), *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)
    played = [{"case": key[0], "engine": key[1], **asdict(cost)} for key, rounds in costs.items() for cost in rounds]
    versions = {name: version(name) for name in ("flwr", "ray", "torch")}
    result = {**bars, **settings, "cpus": os.cpu_count(), "machine": platform.platform(), **versions, "played": played}
    _RESULT.parent.mkdir(parents=True, exist_ok=True)
    _RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("BAR " + " ".join(f"{name}={value:.3g}" for name, value in bars.items()))


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog=f"python -m {_HERE}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="times that every engine is started anew (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds that count, each time (default: 2)")
    parser.add_argument("--sites", type=int, default=_SITES, help=f"sites of each case (default: {_SITES})")
    parser.add_argument("--quick", action="store_true", help="once: a first look in under three minutes")
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        engine, folder, *cases = options.play
        _play(engine, cases, options.rounds, Path(folder))
        return 0
    if (least := min(options.repeats, options.rounds, options.sites)) < 1:
        parser.error(f"expected --repeats, --rounds and --sites of at least 1, got {least}")
    repeats = 1 if options.quick else options.repeats
    settings = {"repeats": repeats, "rounds": options.rounds, "sites": options.sites}
    console = Console()
    try:
        costs = measure(**settings, say=lambda text: console.print(text, highlight=False))
    except FedsieveError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    _report(costs, settings, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
