"""Standardise, mask, clip, noise, restore."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from client import dpsgd
from client.clipping.per_record import per_record_gradients
from client.data import SiteData
from client.dpsgd import Step
from client.mechanisms.upload import Upload
from common.coding import Values
from common.methods.importance import standardisation, standardised
from common.models import FlatModel
from common.plan import RoundPlan
from common.randomness import RoundRandomness


def train_round(
    model: FlatModel,
    data: SiteData,
    plan: RoundPlan,
    randomness: RoundRandomness,
    progress: Callable[[int], None],
    reference: Values,
) -> Upload:
    """Return how far the kept coordinates moved: as it is in the warm-up, standardised after it.

    Guarantees: alpha and spread come from broadcast models, so that every step is the sampled Gaussian mechanism on
    clipped vectors, as in random sparsification; restoring follows the noise.
    """
    if not plan.standardised:
        return Upload(dpsgd.train_round(model, data, plan, randomness, progress))
    start: Values = model.vector.cpu().numpy().copy()
    alpha, spread = (part[plan.mask.indices()] for part in standardisation(start, reference, plan))
    expected_batch = plan.sampling_rate * data.declared_size

    def make_step(model: FlatModel, kept: Tensor | None, plan: RoundPlan, data: SiteData) -> Step:
        centre, scale = _on(model, alpha), _on(model, spread)

        def gradient_sum(inputs: Tensor, targets: Tensor) -> Tensor:
            return standardised_sum(model, kept, plan, centre, scale, inputs, targets)

        return Step(gradient_sum, adds_noise=True, restore=lambda total: total * scale + expected_batch * centre)

    moved = dpsgd.train_round(model, data, plan, randomness, progress, make_step)
    return Upload(standardised(moved, alpha, spread, plan))


def standardised_sum(
    model: FlatModel,
    kept: Tensor | None,
    plan: RoundPlan,
    centre: Tensor,
    scale: Tensor,
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return the sum over records of clip((m * g_i - centre) / scale, C), shape (kept,).

    Guarantees: adding or removing one record changes it by at most C in L2 norm, up to rounding.
    Edge cases: an empty batch gives zeros; a record whose gradient is not finite contributes zero.
    """
    total = torch.zeros_like(centre)
    for gradients in per_record_gradients(model, inputs, targets, plan.physical_batch_size):
        masked = gradients if kept is None else gradients.index_select(1, kept)
        vectors = (masked - centre) / scale  # (chunk, kept)
        norms = vectors.norm(dim=1)
        finite = norms.isfinite()
        factors = plan.clip_norm / norms[finite].clamp(min=plan.clip_norm)
        total.addmv_(vectors[finite].T, factors)
    return total


def _on(model: FlatModel, values: Values) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=model.vector.dtype, device=model.vector.device)
