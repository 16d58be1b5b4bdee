"""Choosing coordinates that pass a threshold, by the sparse vector technique."""

import math
from typing import TYPE_CHECKING, Any, ClassVar

from common.methods.selecting import PAPER, Selecting
from common.renyi import sparse_vector_rho

if TYPE_CHECKING:
    from common.config import RunConfig
    from common.plan import RoundPlan


class SelectSparseVector(Selecting):
    """Coordinates are visited in a random order until enough have passed a noisy threshold."""

    name = "select-sparse-vector"
    title = "each site picks coordinates that pass a noisy threshold"
    paper = f"{PAPER}, Algorithms 1 and 3"
    about = (
        "As select-exponential, but coordinates are visited in a random order and taken where |mean| plus Laplace "
        "noise passes pick-threshold plus Laplace noise, until final-density of them are taken; there may be fewer. "
        "Each one taken is a mechanism that is pick-epsilon-DP (pick-epsilon^2 / 2 of zCDP), whatever number was "
        "looked at. The published loop stops one coordinate after what it pays for; this one stops in time."
    )
    needs: ClassVar[tuple[str, ...]] = ("pick_epsilon",)
    accounting = "sampled (sparse vector + Gaussian)"

    def plan_fields(self, config: "RunConfig", noise_multiplier: float, round_number: int) -> dict[str, Any]:
        """Return how coordinates are picked."""
        fields = super().plan_fields(config, noise_multiplier, round_number)
        return {**fields, "pick_epsilon": config.pick_epsilon, "pick_threshold": config.pick_threshold}

    def selection_rho(self, plan: "RoundPlan") -> float:
        """Return the cost of one search."""
        return sparse_vector_rho(plan.pick_epsilon, plan.mask_kept)

    def published_selection_epsilon(self, plan: "RoundPlan", delta: float) -> float:
        """Return Algorithm 1's: noise of scale s sqrt(32 c log(2 / delta)) / (0.95 epsilon) for the threshold."""
        return plan.pick_epsilon * math.sqrt(8 * plan.mask_kept * math.log(2 / delta)) / 0.95


METHOD = SelectSparseVector()
