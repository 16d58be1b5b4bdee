"""What a site runs for each method. Every module holds one ``train_round``; torch lives here, data passes through.

``train_round(model, data, plan, randomness, progress)`` carries out the steps of a plan and returns an ``Upload``: a
plan's method names its module (``common.methods.Method.mechanism``), which methods may share.
"""

from collections.abc import Callable
from importlib import import_module

from client.data import SiteData
from client.mechanisms.upload import Upload
from common.coding import Values
from common.models import FlatModel
from common.plan import RoundPlan
from common.randomness import RoundRandomness


def train_round(
    model: FlatModel,
    data: SiteData,
    plan: RoundPlan,
    randomness: RoundRandomness,
    progress: Callable[[int], None] = lambda steps_done: None,
    reference: Values | None = None,
) -> Upload:
    """Carry out the steps of ``plan`` from ``model`` by its method and return what the site may release.

    ``reference`` is the model that the plan names besides; mechanisms of methods that have one take it last.
    """
    mechanism = import_module(f"client.mechanisms.{plan.how.mechanism}")
    besides = () if reference is None else (reference,)
    upload: Upload = mechanism.train_round(model, data, plan, randomness, progress, *besides)
    return upload
