"""Clip, then mask."""

from collections.abc import Callable

from torch import Tensor

from client import dpsgd
from client.data import SiteData
from client.dpsgd import Step
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
    """Return how far the kept coordinates moved."""
    return Upload(dpsgd.train_round(model, data, plan, randomness, progress, posterior_step))


def posterior_step(model: FlatModel, kept: Tensor | None, plan: RoundPlan, data: SiteData) -> Step:
    """Return the step that sums m * clip(g_i, C).

    Guarantees: taking coordinates away makes no vector longer, so that a record still changes the sum by at most C.
    """
    if not plan.private or kept is None:
        return dpsgd.masked_step(model, kept, plan, data)
    whole = dpsgd.clipped_sum(model, None, plan, data)
    return Step(lambda inputs, targets: whole(inputs, targets).index_select(0, kept), adds_noise=True)
