"""A fresh random mask for every step."""

from collections.abc import Callable
from dataclasses import replace

import torch

from client import dpsgd
from client.data import SiteData
from client.mechanisms.upload import Upload
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
    """Return how far the union of the steps' masks moved.

    Guarantees: every step is one of random sparsification on a mask of its own, and so is its charge.
    """
    start = model.vector.clone()
    masks = plan.mask.parts()
    for step in range(plan.steps):
        progress(step)
        mask = masks[min(step, len(masks) - 1)]  # one mask for all where all are dense
        one = replace(
            plan, steps=1, mask_epoch=mask.epoch, mask_kept=mask.kept, mask_draws=1, mask_drawn_kept=0, method="random"
        )
        dpsgd.train_round(model, data, one, randomness)
    moved = model.vector.sub(start)
    union = torch.tensor(plan.mask.indices(), device=moved.device)
    return Upload(moved.index_select(0, union).cpu().numpy())
