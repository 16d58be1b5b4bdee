"""What a case of an experiment can be: a federated run, or one of the attacks."""

import fcntl
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import ConfigValue, RunConfig
from common.errors import ConfigError
from server.runlog import Event
from simulations import many_runs
from simulations.attacks.inversion import InversionSettings, invert_releases
from simulations.attacks.linear import LinearSettings, attack_releases
from simulations.attacks.settings import as_mapping, defaults_of, parse_settings
from simulations.report.summary import RunSummary, load_run
from simulations.run import Engine, config_with, defaults, simulate

Settings = Mapping[str, ConfigValue]
Figures = dict[str, float]
Progress = Callable[[float], None]

_TAIL = 5  # evaluations whose mean is the tail accuracy
_RUNNERS_OWN = {"name", "out", "resume", "seed"}
_CHANGE_NOTHING = {"device", "round-deadline"}


@dataclass(frozen=True, slots=True)
class Measure:
    """A way to get figures from settings and a seed; ``folder`` is its own, and may hold what an earlier try left.

    ``identity`` returns every setting that the figures depend on: a result counts as long as they are the same.
    ``defaults`` are those of settings that may be left out.
    """

    name: str
    check: Callable[[Settings], None]
    identity: Callable[[Settings], dict[str, ConfigValue]]
    defaults: Callable[[], dict[str, ConfigValue]]
    carry_out: Callable[[Settings, int, Path, Progress], Figures]


def _run_config(settings: Settings, seed: int, folder: Path) -> RunConfig:
    return config_with({**settings, "seed": seed, "out": str(folder.parent), "name": folder.name})


def _check_run(settings: Settings) -> None:
    if clash := sorted(settings.keys() & _RUNNERS_OWN):
        raise ConfigError(f"the settings have {clash[0]!r}, which the runner sets itself: leave it out")
    _run_config(settings, 1, Path("runs/check"))


def _run_identity(settings: Settings) -> dict[str, ConfigValue]:
    mapping = _run_config(settings, 1, Path("runs/check")).to_mapping()
    return {key: value for key, value in mapping.items() if key not in _RUNNERS_OWN | _CHANGE_NOTHING}


def _carry_out_run(settings: Settings, seed: int, folder: Path, progress: Progress) -> Figures:
    config = _run_config(settings, seed, folder)

    def follow(event: Event) -> None:
        if event["event"] == "round":
            progress(event["round"] / config.rounds)

    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        summary = many_runs.finished(config)
        if summary is None:
            # All sites in this process: the cores are busy with the other cases.
            simulate(many_runs.config_to_start(config), Engine(in_process=True), (follow,))
            summary = load_run(folder)
    return _figures(summary)


def _figures(summary: RunSummary) -> Figures:
    accuracies = [one.accuracy for one in summary.rounds if one.accuracy is not None]
    figures = {
        "accuracy": summary.accuracy,
        "tail_accuracy": statistics.fmean(accuracies[-_TAIL:]) if accuracies else None,
        "epsilon": summary.epsilon,
        "uplink": float(summary.uplink),
        "downlink": float(summary.downlink),
        "uplink_saving": summary.dense_uplink / summary.uplink if summary.uplink else None,
        "total_density": summary.total_density,
        "seconds": summary.seconds,
    }
    return {name: value for name, value in figures.items() if value is not None}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for whoever else is at this run: a worker may outlive a runner that was killed by a moment."""
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _carry_out_inversion(settings: Settings, seed: int, folder: Path, progress: Progress) -> Figures:
    found = invert_releases(parse_settings(InversionSettings, settings), seed, progress)
    found.save(folder)
    return found.figures


def _carry_out_linear(settings: Settings, seed: int, folder: Path, progress: Progress) -> Figures:
    found = attack_releases(parse_settings(LinearSettings, settings), seed, progress)
    found.pictures.save(folder)
    return found.figures


def _attack(name: str, kind: Any, carry_out: Callable[[Settings, int, Path, Progress], Figures]) -> Measure:
    def check(settings: Settings) -> None:
        parse_settings(kind, settings)

    def identity(settings: Settings) -> dict[str, ConfigValue]:
        return as_mapping(parse_settings(kind, settings))

    return Measure(name, check, identity, lambda: defaults_of(kind), carry_out)


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("run", _check_run, _run_identity, defaults, _carry_out_run),
        _attack("inversion", InversionSettings, _carry_out_inversion),
        _attack("linear", LinearSettings, _carry_out_linear),
    )
}
