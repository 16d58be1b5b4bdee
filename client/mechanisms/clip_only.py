"""Clipping without noise. Not private: no plan that asks for it can be charged."""

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
    """Return how far the kept coordinates moved along clipped sums that nothing hides."""

    def make_step(model: FlatModel, kept: Tensor | None, plan: RoundPlan, data: SiteData) -> Step:
        return Step(dpsgd.clipped_sum(model, kept, plan, data), adds_noise=False)

    return Upload(dpsgd.train_round(model, data, plan, randomness, progress, make_step))
