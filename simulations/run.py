"""``fedsieve simulate``: a whole federation on this machine, or on a Ray cluster."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common import datasets
from common.config import ConfigValue, RunConfig
from common.errors import ConfigError
from server.app import RunResult
from server.app import run as run_server
from server.runfolder import RunFolder
from server.runlog import Listener
from simulations.grid import LocalGrid
from simulations.seeded import SeededRandomness

_SERVER = 2**63 - 1  # stands for the server where sites have their numbers: its streams are its own
_PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Where the sites of a simulation run; changes no result."""

    actors: int = 0
    gpus_per_actor: float = 0.0
    ray_address: str | None = None
    in_process: bool = False


def defaults() -> dict[str, ConfigValue]:
    """Return every run-config key with its default, from ``pyproject.toml``."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))
    return dict(project["tool"]["flwr"]["app"]["config"])


def config_with(changes: Mapping[str, ConfigValue]) -> RunConfig:
    """Return the default run config with ``changes``."""
    return RunConfig.parse({**defaults(), **changes})


def config_of_run(folder: Path) -> RunConfig:
    """Return the config with which the run in ``folder`` goes on."""
    began = RunFolder(folder).read_config()
    return RunConfig.parse({**began, "resume": True, "name": folder.name, "out": str(folder.parent)})


def simulate(config: RunConfig, engine: Engine, listeners: tuple[Listener, ...] = ()) -> RunResult:
    """Run a simulation to its end and return its result."""
    dataset = datasets.load(config.dataset)
    if engine.actors < 0 or engine.gpus_per_actor < 0:
        raise ConfigError(f"expected --actors and --gpus-per-actor of 0 or more, got {engine}")
    grid = _open_grid(config, dataset, engine)
    try:
        return run_server(
            grid, config, listeners, seeded=lambda number: SeededRandomness(config.seed, _SERVER).for_round("", number)
        )
    finally:
        grid.close()


def _open_grid(config: RunConfig, dataset: datasets.Dataset, engine: Engine) -> LocalGrid:
    # Imported here: Ray and the sites' torch are slow to load, and a bad config should be told before that.
    if engine.in_process:
        from client.app import app
        from simulations import sites
        from simulations.grid import InProcessGrid

        sites.provide(sites.SimulatedSites.of(config, config.sites, dataset))
        return InProcessGrid(app, config.sites, config.to_mapping())
    from simulations.ray_grid import RayGrid

    return RayGrid(
        config,
        dataset,
        actors=engine.actors,
        gpus_per_actor=engine.gpus_per_actor,
        ray_address=engine.ray_address,
    )
