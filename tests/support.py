"""What several tests share: a small data set, short configs, brute-force references."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from client.data import SiteData
from common.broadcast import digest_of, encode_floats
from common.config import RunConfig
from common.datasets import Dataset
from common.models import FlatModel
from common.plan import RoundPlan
from simulations.run import config_with
from simulations.seeded import GeneratorRandomness

RECORDS, FEATURES, CLASSES = 240, 12, 3
SMALL_MODEL = f"mlp:{FEATURES}-8-{CLASSES}"


def small_dataset() -> Dataset:
    """Return three noisy clusters that a small network can tell apart."""
    rng = np.random.default_rng(7)
    centres = rng.normal(size=(CLASSES, FEATURES))
    targets = np.arange(RECORDS) % CLASSES
    inputs = (centres[targets] + 0.5 * rng.normal(size=(RECORDS, FEATURES))).astype(np.float32)
    return Dataset(inputs, targets.astype(np.int64), inputs[:60], targets[:60].astype(np.int64))


def dataset_with_bad_record() -> Dataset:
    """Return the small data set with one record whose class does not exist: training on it raises."""
    dataset = small_dataset()
    dataset.train_targets[5] = CLASSES + 5
    return dataset


class _SquaredError(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] - targets) ** 2


def squared_error_model() -> nn.Module:
    """Return a model with a loss of its own."""
    return _SquaredError()


def small_config(out: Path, **changes: Any) -> RunConfig:
    """Return a config of a run that takes well under a second."""
    settings = {
        "out": str(out),
        "dataset": "tests.support:small_dataset",
        "model": SMALL_MODEL,
        "rounds": 4,
        "sites": 6,
        "steps-per-round": 3,
        "sampling-rate": 0.5,
        "learning-rate": 0.5,
        "physical-batch-size": 16,
    }
    return config_with({**settings, **{key.replace("_", "-"): value for key, value in changes.items()}})


def small_plan(size: int, **changes: Any) -> RoundPlan:
    """Return a plan for a model of ``size`` parameters, half of them kept."""
    fields: dict[str, Any] = {
        "run": "test",
        "round": 1,
        "model_version": 0,
        "model": SMALL_MODEL,
        "mask_seed": 1,
        "mask_epoch": 0,
        "mask_size": size,
        "mask_kept": max(1, size // 2),
        "private": True,
        "privacy_unit": "record",
        "cohort": 1.0,
        "steps": 1,
        "sampling_rate": 1.0,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "learning_rate": 1.0,
        "momentum": 0.0,
        "physical_batch_size": 64,
        "value_coding": "f32",
        "index_coding": "seed",
        "grid": 0.5,
        "model_digest": "0" * 16,
        "model_step": 0.0,
    }
    return RoundPlan(**{**fields, **changes})


def small_request(start: np.ndarray, **changes: Any) -> tuple[bytes, bytes]:
    """Return the bytes of a plan that starts from the model ``start``, and those of the model as float32."""
    plan = small_plan(start.size, model_digest=digest_of(start), **changes)
    return plan.to_bytes(), encode_floats(start, "f32")


def site_data(inputs: np.ndarray, targets: np.ndarray, declared_size: int | None = None) -> SiteData:
    """Return all given records as one site's."""
    return SiteData(inputs, targets, np.arange(len(targets)), declared_size or max(1, len(targets)))


class Silence:
    """A noise generator that draws zeros: for tests that must see what the noise hides."""

    def standard_normal(self, count: int, dtype: type = np.float32) -> np.ndarray:
        return np.zeros(count, dtype)

    def integers(self, high: int, size: int, dtype: type = np.uint64) -> np.ndarray:
        """Words in the middle of their range: Laplace noise of 0, Gumbel noise that is the same everywhere."""
        return np.full(size, high // 2, dtype)


def silent(seed: int = 0) -> GeneratorRandomness:
    """Return a round's randomness with real sampling and no noise."""
    return GeneratorRandomness(np.random.default_rng(seed), Silence())  # type: ignore[arg-type]


def brute_force_clipped_sum(
    model: FlatModel, inputs: torch.Tensor, targets: torch.Tensor, kept: np.ndarray, clip_norm: float
) -> np.ndarray:
    """Return the sum over records of clip(m * g_i, clip_norm), one backward pass a record, in float64."""
    total = np.zeros(kept.size)
    for record, target in zip(inputs, targets, strict=True):
        gradient = model.gradient(record[None], target[None]).double().numpy()[kept]
        norm = np.linalg.norm(gradient)
        if np.isfinite(norm):
            total += gradient * min(1.0, clip_norm / norm) if norm > 0 else 0
    return total


def wide_model() -> nn.Module:
    """Return a model of 20,000 parameters whose gradients are zero where its inputs are."""
    return nn.Linear(200, 100, bias=False)
