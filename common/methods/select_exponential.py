"""Choosing coordinates by the exponential mechanism, all at once."""

import math
from typing import TYPE_CHECKING, Any, ClassVar

from common.methods.selecting import PAPER, Selecting
from common.renyi import exponential_rho

if TYPE_CHECKING:
    from common.config import RunConfig
    from common.plan import RoundPlan


class SelectExponential(Selecting):
    """The largest coordinates of the mean with Gumbel noise: peeling by the exponential mechanism in one draw."""

    name = "select-exponential"
    title = "each site picks large coordinates by the exponential mechanism"
    paper = f"{PAPER}, Algorithms 3 and 4"
    about = (
        "In each step (select-per=step) or once a round (select-per=round) a site clips every record's gradient to "
        "clip-norm, takes the mean over the expected batch, and picks final-density of its coordinates: the largest of "
        "min(|mean|, entry-bound) plus Gumbel noise, which is the exponential mechanism applied again and again, in "
        "one draw. What was picked is clipped to second-clip-norm as a whole and gets Gaussian noise, scaled to the "
        "true sensitivity min(S1/b, 2 S2). Picks cost pick-epsilon^2 / 8 of zCDP each (bounded range); pick and noise "
        "are composed on one sample, amplified by sampling, and composed over the steps."
    )
    needs: ClassVar[tuple[str, ...]] = ("pick_epsilon", "entry_bound")
    accounting = "sampled (exponential mechanism + Gaussian)"

    def plan_fields(self, config: "RunConfig", noise_multiplier: float, round_number: int) -> dict[str, Any]:
        """Return how coordinates are picked."""
        fields = super().plan_fields(config, noise_multiplier, round_number)
        return {**fields, "pick_epsilon": config.pick_epsilon, "entry_bound": config.entry_bound}

    def selection_rho(self, plan: "RoundPlan") -> float:
        """Return the cost of one choice."""
        return exponential_rho(plan.pick_epsilon, plan.mask_kept)

    def published_selection_epsilon(self, plan: "RoundPlan", delta: float) -> float:
        """Return Algorithm 4's: picks compose to pick_epsilon sqrt(2 k log(1 / delta))."""
        return plan.pick_epsilon * math.sqrt(2 * plan.mask_kept * math.log(1 / delta))


METHOD = SelectExponential()
