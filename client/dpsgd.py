"""Sparse DP-SGD: one round of noisy steps on the kept coordinates."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from client.clipping.book_keeping import ClippedSum
from client.clipping.self_check import require_agreement
from client.data import SiteData
from common.coding import Values, clipped
from common.models import FlatModel
from common.plan import RoundPlan
from common.randomness import RoundRandomness


@dataclass(frozen=True, slots=True)
class Step:
    """What a method does with the batch of a step.

    ``gradient_sum`` returns the sum of its gradients on the kept coordinates; noise of std z C falls on it where it
    ``adds_noise``; ``restore`` then maps it back to gradients, where they were standardised before.
    """

    gradient_sum: Callable[[Tensor, Tensor], Tensor]
    adds_noise: bool
    restore: Callable[[Tensor], Tensor] = lambda total: total


def masked_step(model: FlatModel, kept: Tensor | None, plan: RoundPlan, data: SiteData) -> Step:
    """Return the step of random sparsification: mask, then clip; a plan that is not private does neither."""
    if plan.private and plan.privacy_unit == "record":
        return Step(clipped_sum(model, kept, plan, data), adds_noise=True)
    return Step(PlainSum(model, kept, plan), adds_noise=False)


def train_round(
    model: FlatModel,
    data: SiteData,
    plan: RoundPlan,
    randomness: RoundRandomness,
    progress: Callable[[int], None] = lambda steps_done: None,
    make_step: Callable[[FlatModel, Tensor | None, RoundPlan, SiteData], Step] = masked_step,
) -> Values:
    """Train ``model`` for the steps of ``plan`` and return how far the kept coordinates moved, shape (kept,).

    Computes, ``plan.steps`` times, for a Poisson batch with rate q of the records and n = ``data.declared_size``:
    sum of clip(m * g_i, C), plus N(0, (zC)^2) on the kept coordinates, over q * n; velocity = momentum * velocity +
    that; parameters -= learning_rate * velocity.
    Guarantees: each step is the sampled Gaussian mechanism with sensitivity C, so the round costs ``plan.charge``;
    coordinates off the mask do not change by one bit; every private step draws fresh noise, an empty batch included.
    ``progress`` is told before each step how many are done; what it raises ends the round. ``make_step`` is another
    method's way to sum a batch, and then its own promise.
    Where the unit is the client the steps neither clip nor add noise; the movement as a whole, which is on the mask
    already, is clipped to C, and the server adds the noise.
    Edge cases: a plan that is not private neither clips nor adds noise. The velocity starts at zero in every round.
    Source: random-sparsification, Algorithm 1; for clients McMahan et al., "Learning differentially private recurrent
    language models" (2018).
    """
    kept = _kept_on(model, plan)
    device = model.vector.device
    seed_modules(randomness.module_seed(), device)
    step = make_step(model, kept, plan, data)

    start = model.vector.clone() if kept is None else model.vector.index_select(0, kept)
    velocity = torch.zeros_like(start) if plan.momentum else None
    expected_batch = plan.sampling_rate * data.declared_size
    noise_std = plan.noise_multiplier * plan.clip_norm
    for steps_done in range(plan.steps):
        progress(steps_done)
        rows = randomness.poisson_sample(data.size, plan.sampling_rate)
        total = step.gradient_sum(*data.batch(rows, device))
        if step.adds_noise:
            noise = torch.from_numpy(randomness.standard_normal(total.numel())).to(device)
            # In the noise's precision, rounded once: in single precision the sum could only take some of the numbers
            # near it, and which ones would tell what it was before.
            total = total.to(noise.dtype).add_(noise, alpha=noise_std).to(total.dtype)
        total = step.restore(total)
        if velocity is not None:
            total = velocity.mul_(plan.momentum).add_(total)
        step_size = plan.learning_rate / expected_batch
        if kept is None:
            model.vector.sub_(total, alpha=step_size)
        else:
            model.vector.scatter_add_(0, kept, total * -step_size)
    moved = (model.vector if kept is None else model.vector.index_select(0, kept)).sub(start)
    values: Values = moved.cpu().numpy()
    return clipped(values, plan.clip_norm) if plan.private and plan.privacy_unit == "client" else values


def seed_modules(seed: int, device: torch.device) -> None:
    """Seed what is random inside modules, such as dropout; torch.manual_seed would cost a stack trace every time."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _kept_on(model: FlatModel, plan: RoundPlan) -> Tensor | None:
    """Return the kept coordinates on the model's device, or None where all are kept and no gather is needed."""
    if plan.mask.kept == plan.mask.size:
        return None
    return torch.tensor(plan.mask.indices(), device=model.vector.device)


def clipped_sum(model: FlatModel, kept: Tensor | None, plan: RoundPlan, data: SiteData) -> ClippedSum:
    """Return the engine, for a model that passes the self-check."""
    require_agreement(model, data.example)
    return ClippedSum(model, kept, plan.clip_norm, plan.physical_batch_size)


class PlainSum:
    """The sum of a batch's gradients, neither clipped nor per record: for plans that are not private."""

    def __init__(self, model: FlatModel, kept: Tensor | None, plan: RoundPlan) -> None:
        self._model = model
        self._kept = kept
        self._chunk = plan.physical_batch_size

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum on the kept coordinates; an empty batch gives zeros."""
        total: Tensor | None = None
        for chunk, chunk_targets in zip(
            torch.split(inputs, self._chunk), torch.split(targets, self._chunk), strict=True
        ):
            if len(chunk):
                gradient = self._model.gradient(chunk, chunk_targets)
                total = gradient if total is None else total.add_(gradient)
        if total is None:
            total = torch.zeros_like(self._model.vector)
        return total if self._kept is None else total.index_select(0, self._kept)
