"""Mask, clip, noise on the kept coordinates: dense, random and every method that differs in its masks alone."""

from collections.abc import Callable

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
    """Return how far the kept coordinates moved; see ``client.dpsgd.train_round``."""
    return Upload(dpsgd.train_round(model, data, plan, randomness, progress))
