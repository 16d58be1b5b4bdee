"""Sparse DP-SGD: one round of noisy steps on the kept coordinates."""

import numpy as np
import torch
from torch import Tensor

from client.clipping import ClippedSum
from client.clipping.per_record import PerRecordClippedSum
from client.data import SiteData
from client.randomness import RoundRandomness
from common.coding import Values
from common.models import FlatModel, sample_losses
from common.plan import RoundPlan


def train_round(model: FlatModel, data: SiteData, plan: RoundPlan, randomness: RoundRandomness) -> Values:
    """Train ``model`` for the steps of ``plan`` and return how far the kept coordinates moved, shape (kept,).

    Computes, ``plan.steps`` times, for a Poisson batch with rate q of the records and n = ``data.declared_size``:
    sum of clip(m * g_i, C), plus N(0, (zC)^2) on the kept coordinates, over q * n; velocity = momentum * velocity +
    that; parameters -= learning_rate * velocity.
    Guarantees: each step is the sampled Gaussian mechanism with sensitivity C, so the round costs ``plan.charge``;
    coordinates off the mask do not change by one bit; every private step draws fresh noise, an empty batch included.
    Edge cases: a plan that is not private neither clips nor adds noise. The velocity starts at zero in every round.
    Source: random-sparsification, Algorithm 1.
    """
    kept = _kept_on(model, plan)
    device = model.vector.device
    torch.manual_seed(randomness.module_seed())
    gradient_sum: ClippedSum
    if plan.private:
        gradient_sum = PerRecordClippedSum(model, kept, plan.clip_norm, plan.physical_batch_size)
    else:
        gradient_sum = _PlainSum(model, kept, plan.physical_batch_size)

    start = model.vector.clone() if kept is None else model.vector[kept]
    moved = torch.zeros_like(start)
    velocity = torch.zeros_like(start) if plan.momentum else None
    expected_batch = plan.sampling_rate * data.declared_size
    noise_std = plan.noise_multiplier * plan.clip_norm
    for _ in range(plan.steps):
        rows = randomness.poisson_sample(data.size, plan.sampling_rate)
        total = gradient_sum(*data.batch(rows, device))
        if plan.private:
            noise = torch.from_numpy(randomness.standard_normal(total.numel())).to(device)
            total = total.add_(noise, alpha=noise_std)
        if velocity is not None:
            total = velocity.mul_(plan.momentum).add_(total)
        moved.sub_(total, alpha=plan.learning_rate / expected_batch)
        if kept is None:
            torch.add(start, moved, out=model.vector)
        else:
            model.vector[kept] = start + moved
    values: Values = moved.cpu().numpy().astype(np.float32, copy=False)
    return values


def _kept_on(model: FlatModel, plan: RoundPlan) -> Tensor | None:
    """Return the kept coordinates on the model's device, or None where all are kept and no gather is needed."""
    if plan.mask.kept == plan.mask.size:
        return None
    return torch.tensor(plan.mask.indices(), device=model.vector.device)


class _PlainSum:
    """The sum of a batch's gradients, neither clipped nor per record: for plans that are not private."""

    def __init__(self, model: FlatModel, kept: Tensor | None, physical_batch_size: int) -> None:
        self._model = model
        self._kept = kept
        self._chunk = physical_batch_size

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._model.gradient.zero_()
        for chunk, chunk_targets in zip(
            torch.split(inputs, self._chunk), torch.split(targets, self._chunk), strict=True
        ):
            if len(chunk):
                module = self._model.module
                sample_losses(module, module(chunk), chunk_targets).sum().backward()  # type: ignore[no-untyped-call]
        gradient = self._model.gradient
        return gradient if self._kept is None else gradient[self._kept]
