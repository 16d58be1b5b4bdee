"""Noise without clipping. Not private: no plan that asks for it can be charged."""

from collections.abc import Callable

from torch import Tensor

from client import dpsgd
from client.data import SiteData
from client.dpsgd import PlainSum, Step
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
    """Return how far the kept coordinates moved under noise of std z C on sums that nothing bounds."""

    def make_step(model: FlatModel, kept: Tensor | None, plan: RoundPlan, data: SiteData) -> Step:
        return Step(PlainSum(model, kept, plan), adds_noise=True)

    return Upload(dpsgd.train_round(model, data, plan, randomness, progress, make_step))
