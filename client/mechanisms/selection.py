"""Clip, choose coordinates, clip again, noise on the chosen ones: the select methods."""

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from client.data import SiteData
from client.dpsgd import clipped_sum, seed_modules
from client.mechanisms.upload import Upload
from client.selection import Vector, second_clip, select_exponential, select_random, select_sparse_vector
from common.mask import Indices
from common.methods.selecting import Selecting
from common.models import FlatModel
from common.plan import RoundPlan
from common.randomness import RoundRandomness


def train_round(
    model: FlatModel,
    data: SiteData,
    plan: RoundPlan,
    randomness: RoundRandomness,
    progress: Callable[[int], None],
) -> Upload:
    """Train ``model`` for the steps of ``plan`` and return the coordinates that were chosen and how far they moved.

    Computes, ``plan.steps`` times, for a Poisson batch with rate q and b = q * ``data.declared_size``: the mean
    sum of clip(g_i, S1) / b; ``plan.mask_kept`` of its coordinates (anew in each step, or in the first for the whole
    round); these, projected onto the ball of radius S2, plus N(0, (z D)^2) with D their sensitivity; parameters there
    -= learning_rate * that.
    Guarantees: choice and noise of a step are two mechanisms on one sample, so the round costs ``plan.charge``. No
    other coordinate changes by one bit. An empty batch is a step like any other.
    Source: dp-selection-wide-networks, Algorithm 3, with the right D: see ``Selecting.sensitivity``.
    """
    device = model.vector.device
    seed_modules(randomness.module_seed(), device)
    gradient_sum = clipped_sum(model, None, plan, data)
    expected_batch = plan.sampling_rate * data.declared_size
    noise_std = plan.noise_multiplier * cast(Selecting, plan.how).sensitivity(plan, data.declared_size)
    start = model.vector.clone()
    chosen: Indices | None = None
    touched = np.zeros(model.size, np.bool_)
    for steps_done in range(plan.steps):
        progress(steps_done)
        total = gradient_sum(*data.batch(randomness.poisson_sample(data.size, plan.sampling_rate), device))
        mean: Vector = total.cpu().numpy().astype(np.float64) / expected_batch
        if chosen is None or plan.select_per == "step":
            chosen = _choose(mean, plan, plan.clip_norm / expected_batch, randomness)
            touched[chosen] = True
        clipped = second_clip(mean[chosen], plan.second_clip_norm) if plan.second_clip_norm else mean[chosen]
        # In double precision and rounded once, as in client.dpsgd.
        noisy = clipped + noise_std * randomness.standard_normal(chosen.size).astype(np.float64)
        _move(model.vector, chosen, -plan.learning_rate * noisy)
    indices = np.flatnonzero(touched).astype(np.int64, copy=False)
    moved = (model.vector - start).cpu().numpy()[indices]
    return Upload(moved, indices)


def _choose(mean: Vector, plan: RoundPlan, record_bound: float, randomness: RoundRandomness) -> Indices:
    match plan.method:
        case "select-exponential":
            return select_exponential(
                mean,
                picks=plan.mask_kept,
                pick_epsilon=plan.pick_epsilon,
                entry_bound=plan.entry_bound,
                record_bound=record_bound,
                randomness=randomness,
            )
        case "select-sparse-vector":
            return select_sparse_vector(
                mean,
                picks=plan.mask_kept,
                pick_epsilon=plan.pick_epsilon,
                threshold=plan.pick_threshold,
                record_bound=record_bound,
                randomness=randomness,
            )
        case _:
            return select_random(mean.size, picks=plan.mask_kept, randomness=randomness)


def _move(vector: Tensor, indices: Indices, by: Vector) -> None:
    place = torch.from_numpy(indices).to(vector.device)
    vector.index_add_(0, place, torch.from_numpy(by.astype(np.float32)).to(vector.device))
