"""What a case of an experiment can be: a federated run, a run that is watched, or one of the attacks."""

import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import datasets, models
from common.config import ConfigValue, RunConfig
from common.errors import ConfigError
from server.checkpoint import Checkpoint
from server.runfolder import MAY_CHANGE, RunFolder
from server.runlog import Event, read_events
from simulations import many_runs
from simulations.attacks.canaries import (
    CanarySettings,
    exposure,
    random_phrases,
    ranks,
    uniform_distance,
    with_canaries,
)
from simulations.attacks.inversion import InversionSettings, invert_releases
from simulations.attacks.linear import LinearSettings, attack_releases
from simulations.attacks.settings import as_mapping, defaults_of, parse_settings
from simulations.crew import Progress
from simulations.experiments.masks import FrozenCount, as_figures, histograms, overlap
from simulations.report.summary import RunSummary, load_run
from simulations.run import Engine, config_with, defaults, simulate

Settings = Mapping[str, ConfigValue]
Figures = dict[str, float]

_TAIL = 5  # evaluations whose mean is the tail accuracy
_RUNNERS_OWN = {"name", "out", "resume", "seed"}


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
    return {key: value for key, value in mapping.items() if key not in MAY_CHANGE | {"seed"}}


def _carry_out_run(settings: Settings, seed: int, folder: Path, progress: Progress) -> Figures:
    return _figures(many_runs.carried_out(_run_config(settings, seed, folder), progress))


def _figures(summary: RunSummary) -> Figures:
    accuracies = [one.accuracy for one in summary.rounds if one.accuracy is not None]
    figures = {
        "accuracy": summary.accuracy,
        "loss": next((e["loss"] for e in read_events(RunFolder(summary.folder).log) if e["event"] == "end"), None),
        "tail_accuracy": statistics.fmean(accuracies[-_TAIL:]) if accuracies else None,
        "epsilon": summary.epsilon,
        "uplink": float(summary.uplink),
        "downlink": float(summary.downlink),
        "uplink_saving": summary.dense_uplink / summary.uplink if summary.uplink else None,
        "total_density": summary.total_density,
        "seconds": summary.seconds,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _check_masks(settings: Settings) -> None:
    _check_run(settings)
    config = _run_config(settings, 1, Path("runs/check"))
    if (config.value_coding, config.downlink_coding, config.rounds_per_epoch, config.private) != (
        "f32",
        "f32",
        1,
        True,
    ):
        raise ConfigError(
            "to see which parameters move, expected value-coding and downlink-coding f32, rounds-per-epoch 1 and a "
            f"private run, got {config.value_coding}, {config.downlink_coding}, {config.rounds_per_epoch}, "
            f"private={config.private}"
        )


def _carry_out_masks(settings: Settings, seed: int, folder: Path, progress: Progress) -> Figures:
    """Run as ``run`` does, and watch the parameters; what was stopped starts anew, since half a count is none."""
    config = _run_config(settings, seed, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    count = FrozenCount(folder)

    def follow(event: Event) -> None:
        count.follow(event)
        if event["event"] == "round":
            progress(event["round"] / config.rounds)

    with many_runs.alone(folder):
        if folder.exists():
            shutil.rmtree(folder)
        simulate(config, Engine(in_process=True), (follow,))
    assert count.counts is not None, "a run that ended had rounds"
    both = histograms(count.counts, np.array(count.densities))
    return {**_figures(load_run(folder)), "overlap": overlap(*both), **as_figures(*both)}


def _split(settings: Settings) -> tuple[Settings, CanarySettings]:
    """Return the settings of the run, and those of its canaries."""
    own = {key: value for key, value in settings.items() if key in defaults_of(CanarySettings)}
    rest = {key: value for key, value in settings.items() if key not in own}
    canaries: CanarySettings = parse_settings(CanarySettings, own)
    return rest, canaries


def _check_canaries(settings: Settings) -> None:
    _check_run(_split(settings)[0])


def _canary_identity(settings: Settings) -> dict[str, ConfigValue]:
    rest, canaries = _split(settings)
    return {**_run_identity(rest), **as_mapping(canaries)}


def _carry_out_canaries(settings: Settings, seed: int, folder: Path, progress: Progress) -> Figures:
    rest, canaries = _split(settings)
    config = _run_config(rest, seed, folder)
    rng = np.random.default_rng([seed, 0])
    module = models.build(config.model)
    table = getattr(module, "embedding", None)
    if not isinstance(table, torch.nn.Embedding):
        raise ConfigError(f"expected a model with word embeddings, such as cbow:1000-100, got {config.model!r}")
    phrases = random_phrases(canaries.canaries, table.num_embeddings, rng)
    control = random_phrases(canaries.canaries, table.num_embeddings, rng)
    data = with_canaries(datasets.load(config.dataset), phrases, canaries.insertions, table.num_embeddings, seed)
    # Beside the run's folder, which is removed where a stopped run cannot go on.
    file = folder.with_name(f"{folder.name}-data.npz")
    file.parent.mkdir(parents=True, exist_ok=True)
    # In one piece: a worker may outlive a runner that was killed by a moment, and read what this one writes again.
    half = file.with_suffix(".half.npz")
    np.savez(half, **{field.name: getattr(data, field.name) for field in fields(data)})
    half.replace(file)
    summary = many_runs.carried_out(_run_config({**rest, "dataset": str(file)}, seed, folder), progress)
    file.unlink(missing_ok=True)
    flat = models.FlatModel(module)
    flat.load(Checkpoint.load(RunFolder(folder).checkpoint).model)
    embedding = table.weight.detach().numpy()
    shares = ranks(embedding, phrases, canaries.phrases, rng)
    return {
        **_figures(summary),
        "uniform_distance": uniform_distance(shares),
        "control_distance": uniform_distance(ranks(embedding, control, canaries.phrases, rng)),
        "exposure": exposure(shares, canaries.phrases),
    }


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
        Measure("masks", _check_masks, _run_identity, defaults, _carry_out_masks),
        Measure(
            "canaries",
            _check_canaries,
            _canary_identity,
            lambda: {**defaults(), **defaults_of(CanarySettings)},
            _carry_out_canaries,
        ),
        _attack("inversion", InversionSettings, _carry_out_inversion),
        _attack("linear", LinearSettings, _carry_out_linear),
    )
}
