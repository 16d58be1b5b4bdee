"""What a round costs on our Ray engine, against a bare loop and against Flower's engine that do the same work.

``python -m simulations.benchmarks.simulation [--repeats N] [--rounds N] [--quick]``

Two cases. ``training`` has the shape of pfl-research's benchmark: 1,000 sites of 50 pictures, cohorts of 50, one local
epoch in batches of 10, a CNN of 1.6 million parameters. ``overhead`` asks 1,000 sites for next to nothing, so that
what is left is the engine. Nothing is private here: per-record gradients would hide the engine behind the mechanism.

Every engine plays every case in a process of its own, in turns, and all must end with the same model. Costs are
counted from the end of the first round to the end of the last, over the whole tree of processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from simulations.partition import split
from simulations.run import Engine, config_with, simulate
from simulations.seeded import SeededRandomness

_HERE = "simulations.benchmarks.simulation"
_PROJECT = Path(__file__).resolve().parents[2]
_TOLERANCE = 1e-4  # largest difference between the final models of two engines: they add in another order
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}
_COMMON: dict[str, ConfigValue] = {
    "device": "cpu",
    "private": False,
    "final-density": 1.0,
    "evaluate-every": 0,
    "sites": 1000,
    "learning-rate": 0.05,
}
_CASES: dict[str, dict[str, ConfigValue]] = {
    "training": {
        "dataset": f"{_HERE}:pictures",
        "model": f"{_HERE}:cnn",
        "cohort": 50,
        "sampling-rate": 0.2,
        "steps-per-round": 5,
    },
    "overhead": {
        "dataset": f"{_HERE}:points",
        "model": "linear:4-2",
        "cohort": 0,
        "sampling-rate": 1.0,
        "steps-per-round": 1,
    },
}
# In the order of a repeat. The bare loop is first: the others must end with its model.
_TURNS = (
    ("training", "bare loop"),
    ("training", "ours"),
    ("training", "Flower"),
    ("training", "ours, 1 actor"),
    ("overhead", "bare loop"),
    ("overhead", "ours"),
)

Mark = Callable[[], None]


def cnn() -> nn.Module:
    """The CNN of pfl-research's CIFAR-10 benchmark without its dropout: 1,626,442 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def pictures() -> Dataset:
    """Random pictures of CIFAR-10's size, 50 for each of 1,000 sites."""
    rng = np.random.default_rng(1)
    inputs = rng.integers(0, 256, (50_000, 3, 32, 32), np.uint8)
    targets = rng.integers(0, 10, 50_000)
    return Dataset(inputs, targets, inputs[:1], targets[:1])


def points() -> Dataset:
    """Random points, 2 for each of 1,000 sites."""
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((2_000, 4), np.float32)
    targets = rng.integers(0, 2, 2_000)
    return Dataset(inputs, targets, inputs[:1], targets[:1])


def play_bare_loop(config: RunConfig, mark: Mark) -> Values:
    """Train the same cohorts on the same batches with nothing but torch, in one thread."""
    torch.set_num_threads(1)
    dataset = datasets.load(config.dataset)
    shares = split(dataset.train_targets, config.sites, config.partition, config.seed)
    members = [Member(site, site, share.size) for site, share in enumerate(shares)]
    current = torch.from_numpy(models.initial_vector(config.model, config.seed))
    model = models.build(config.model)
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate)
    for round_number in range(1, config.rounds + 1):
        total = torch.zeros_like(current)
        cohort = draw_cohort(members, config.seed, round_number, config.cohort_size)
        for rows in (shares[member.site] for member in cohort):
            pass
        for member in cohort:
            rows = shares[member.site]
            vector_to_parameters(current.clone(), model.parameters())
            randomness = SeededRandomness(config.seed, member.site).for_round("", round_number)
            randomness.module_seed()  # a site draws it first
            for _ in range(config.steps_per_round):
                batch = rows[randomness.poisson_sample(rows.size, config.sampling_rate)]
                inputs = torch.from_numpy(datasets.as_floats(dataset.train_inputs[batch]))
                losses = F.cross_entropy(model(inputs), torch.from_numpy(dataset.train_targets[batch]), reduction="sum")
                optimizer.zero_grad()
                (losses / (config.sampling_rate * rows.size)).backward()
                optimizer.step()
            total += parameters_to_vector(model.parameters()).detach() - current
        current = current + total / len(cohort)
        mark()
    return current.numpy()


def play_ours(config: RunConfig, mark: Mark, actors: int = 0) -> Values:
    """Run the simulation as ``fedsieve simulate`` does."""
    return simulate(config, Engine(actors=actors), (lambda event: mark() if event["event"] == "round" else None,)).model


def play_flower(config: RunConfig, mark: Mark) -> Values:
    """Run the same ServerApp code and the same ClientApp on Flower's simulation engine, with an actor per CPU."""
    from flwr.app import Context
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.constant import NOOP_FEDERATION_ID
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supercore.telemetry import EventType

    from server.app import run as run_server

    server_app, models_left = ServerApp(), []

    def known_members(grid: Grid, sites: int, timeout: float) -> list[Member]:
        """Return the members without asking them, which alone takes minutes on that engine."""
        while len(list(grid.get_node_ids())) < sites:
            time.sleep(0.1)
        # Flower numbers the partitions in the order in which it made the nodes.
        return [Member(site, node_id, 1) for site, node_id in enumerate(grid.state.nodes)]  # type: ignore[attr-defined]

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        with mock.patch("server.app.join", known_members):
            result = run_server(grid, config, (lambda event: mark() if event["event"] == "round" else None,))
        models_left.append(result.model)

    run = Run.create_empty(run_id=1)
    run.primary_task_id, run.federation_id, run.override_config = 1, NOOP_FEDERATION_ID, config.to_mapping()
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
    _run_simulation(
        num_supernodes=config.sites,
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app_attr="client.app:app",
        server_app=server_app,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        app_dir=str(_PROJECT),
        run=run,
        is_app=True,
    )
    return models_left[0]


_ENGINES: dict[str, Callable[[RunConfig, Mark], Values]] = {
    "bare loop": play_bare_loop,
    "ours": play_ours,
    "ours, 1 actor": lambda config, mark: play_ours(config, mark, actors=1),
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
        ticks[pid] = sum(map(int, fields[11:15]))  # own user and system time, then those of reaped children
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one round cost, as the mean over the rounds after the first."""

    cpu_seconds: float
    seconds: float


def _play(case: str, engine: str, rounds: int, model_file: Path) -> None:
    """Play one case on one engine in this process; the last line of its output is the cost as JSON."""
    marks: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as out:
        config = config_with({**_COMMON, **_CASES[case], "rounds": 1 + rounds, "name": "benchmark", "out": out})
        model = _ENGINES[engine](config, lambda: marks.append((tree_cpu_seconds(), time.perf_counter())))
    np.save(model_file, model)
    (cpu, seconds), (last_cpu, last_seconds) = marks[0], marks[-1]
    print(json.dumps(asdict(Cost((last_cpu - cpu) / rounds, (last_seconds - seconds) / rounds))))


def _play_apart(case: str, engine: str, rounds: int, model_file: Path) -> Cost:
    command = [sys.executable, "-m", _HERE, "--rounds", str(rounds), "--play", case, engine, str(model_file)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **_QUIET}, cwd=_PROJECT, check=False
    )
    if done.returncode:
        raise FedsieveError(f"{engine} failed at {case}:\n{done.stdout}{done.stderr}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))
