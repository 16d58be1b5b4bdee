"""What the communication benchmark runs: systems, settings and seeds, each run with its config and its folder."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import datasets
from common.config import ConfigValue, RunConfig
from common.errors import ConfigError, DatasetError
from simulations.benchmarks.bytes_recipes import Recipes
from simulations.run import config_with

REFERENCE = "dense f32"  # what every saving is measured against
SEARCHED = {"dense": REFERENCE, "rs": "RS 0.3, calibrated 0.5"}  # the system that stands for its kind in a search
SEARCH_SEED = 100  # never reported
FAMILIES = (
    "dense f32",
    "dense f16",
    "dense int8",
    "dense calibrated",
    "RS f32 + indices",
    "RS f32",
    "RS calibrated",
)
OURS = FAMILIES[-1]
_FULL, _SHIPPED = "fashion-mnist", "fashion-mnist-12k"
_DENSITIES = (0.5, 0.3, 0.1)
_CURVE_POINTS = 20  # at least so many of a run's rounds are evaluated: enough to draw a curve


@dataclass(frozen=True, slots=True)
class System:
    """A way to send updates and models: nothing but run-config changes.

    ``indices_of`` names the system that sends the same values without their indices, where there is one: the training
    is the same to the bit, so that it need not be repeated.
    """

    name: str
    kind: str  # dense or rs (randomly sparsified): recipes are chosen by kind
    family: str
    changes: Mapping[str, ConfigValue]
    indices_of: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where systems are compared."""

    partition: str
    epsilon: float

    @property
    def title(self) -> str:
        """The setting in words."""
        return f"{self.partition}, epsilon {self.epsilon:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All that is measured: every system in every setting with every seed."""

    dataset: str
    settings: tuple[Setting, ...]
    systems: tuple[System, ...]
    seeds: tuple[int, ...]
    base: Mapping[str, ConfigValue] = field(default_factory=lambda: {"model": "dp-cnn-s", "sites": 10})


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of the benchmark; ``recipe`` is its name, ``without_indices`` the run that trains the same."""

    setting: Setting
    system: System
    recipe: str
    config: RunConfig
    without_indices: RunConfig | None = None

    @property
    def folder(self) -> Path:
        """Where the run is, or will be."""
        return Path(self.config.out) / self.config.name

    @property
    def title(self) -> str:
        """The run in words, which ``--only`` looks at."""
        return f"{self.setting.title}, {self.system.name}, seed {self.config.seed}, recipe {self.recipe}"


def _dense(coding: str, downlink: str) -> System:
    changes: dict[str, ConfigValue] = {"final-density": 1.0, "value-coding": coding, "downlink-coding": downlink}
    return System(f"dense {coding}", "dense", f"dense {coding}", changes)


def _sparse(density: float) -> list[System]:
    floats: dict[str, ConfigValue] = {"final-density": density, "value-coding": "f32", "downlink-coding": "f32"}
    ours: dict[str, ConfigValue] = {
        "final-density": density,
        "value-coding": "calibrated",
        "downlink-coding": "calibrated",
    }
    start = f"RS {density:g}"
    return [
        System(f"{start}, f32", "rs", "RS f32", {**floats, "index-coding": "seed"}),
        System(f"{start}, f32 + indices", "rs", "RS f32 + indices", {**floats, "index-coding": "raw"}, f"{start}, f32"),
        System(f"{start}, calibrated 0.5", "rs", OURS, {**ours, "grid": 0.5}),
        System(f"{start}, calibrated 1", "rs", OURS, {**ours, "grid": 1.0}),
    ]


SYSTEMS = (
    _dense("f32", "f32"),
    _dense("f16", "f16"),
    _dense("int8", "f16"),
    _dense("calibrated", "calibrated"),  # how much of the saving is the coding's, and how much the mask's
    *(system for density in _DENSITIES for system in _sparse(density)),
)
_QUICK = (REFERENCE, "RS 0.3, f32 + indices", "RS 0.3, calibrated 0.5")


def full_study(*, needs_data: bool = True) -> Study:
    """Return the benchmark that is quoted, on all of Fashion-MNIST where that can be found, or is not needed."""
    settings = tuple(Setting(partition, epsilon) for partition in ("iid", "dirichlet:0.3") for epsilon in (3.0, 8.0))
    dataset = _best_dataset() if needs_data else _FULL
    return Study(dataset=dataset, settings=settings, systems=SYSTEMS, seeds=(1, 2, 3))


def quick_study() -> Study:
    """Return a glance at it, on the data that ships here."""
    systems = tuple(system for system in SYSTEMS if system.name in _QUICK)
    settings = (Setting("iid", 3.0), Setting("iid", 8.0))
    return Study(dataset=_SHIPPED, settings=settings, systems=systems, seeds=(1,))


def _best_dataset() -> str:
    try:
        datasets.load(_FULL)
    except DatasetError:
        return _SHIPPED
    return _FULL


def plan(study: Study, recipes: Recipes | None, out: Path) -> list[PlannedRun]:
    """Return the runs of a study with the chosen recipes, or with the run config's defaults where there are none.

    All of a seed come before the next seed, so that a benchmark that was stopped early has something of everything.
    """
    runs = []
    for seed in study.seeds:
        for setting in study.settings:
            of_setting: dict[str, RunConfig] = {}
            for system in study.systems:
                name, changes = "defaults", {}
                if recipes is not None:
                    name = recipes.chosen(system.kind, setting.partition, setting.epsilon)
                    changes = dict(recipes.candidates[name])
                run = _run(study, setting, system, seed, name, changes, out)
                of_setting[system.name] = run.config
                runs.append(replace(run, without_indices=of_setting.get(system.indices_of)))
    return runs


def search_plan(study: Study, recipes: Recipes, out: Path) -> list[PlannedRun]:
    """Return the runs that try every candidate, on a seed that is not reported."""
    by_name = {system.name: system for system in study.systems}
    return [
        _run(study, setting, by_name[system], SEARCH_SEED, name, changes, out)
        for setting in study.settings
        for system in SEARCHED.values()
        for name, changes in recipes.candidates.items()
    ]


def only(runs: Sequence[PlannedRun], wanted: Sequence[str]) -> list[PlannedRun]:
    """Return the runs whose title has all the words, whatever their case."""
    chosen = [run for run in runs if all(word.lower() in run.title.lower() for word in wanted)]
    if not chosen:
        raise ConfigError(f"no run has all of {', '.join(wanted)} in its title, such as {runs[0].title!r}")
    return chosen


def _run(
    study: Study,
    setting: Setting,
    system: System,
    seed: int,
    recipe: str,
    changes: Mapping[str, ConfigValue],
    out: Path,
) -> PlannedRun:
    ours: dict[str, ConfigValue] = {
        **study.base,
        "dataset": study.dataset,
        "partition": setting.partition,
        "epsilon": setting.epsilon,
        **system.changes,
        "seed": seed,
        "evaluate-every": max(1, int(changes.get("rounds", 0)) // _CURVE_POINTS),
        "out": str(out),
        "name": _slug(f"{setting.title} {system.name} seed{seed}" + (f" {recipe}" if seed == SEARCH_SEED else "")),
    }
    if clash := sorted(changes.keys() & ours.keys()):
        raise ConfigError(f"recipe {recipe!r} sets {', '.join(clash)}, which the benchmark sets itself: leave it out")
    return PlannedRun(setting, system, recipe, config_with({**changes, **ours}))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace("epsilon ", "eps")).strip("-")
