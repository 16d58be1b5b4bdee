"""Random masks with the noise raised to the norm of dense noise, and the gain spent on more steps."""

import math
from typing import TYPE_CHECKING, Any

from common.methods.method import Method

if TYPE_CHECKING:
    from common.config import RunConfig


class MatchNoise(Method):
    """Random sparsification whose noise has the norm of a dense run's in every round."""

    name = "match-noise"
    title = "random masks; noise raised to the norm of dense noise, spent on more steps"
    paper = "random-freeze, section 2.2"
    about = (
        "On a mask of density p the noise has sqrt(p) of the norm of dense noise. Here the noise multiplier of a round "
        "is raised to z / sqrt(p), which restores the norm, and steps-per-round to floor(steps / p), which costs a "
        "round about what it cost before. Noise and steps thus change with the density, every round is charged for its "
        "own, and z is calibrated so that all of them together meet the budget."
    )

    def plan_fields(self, config: "RunConfig", noise_multiplier: float, round_number: int) -> dict[str, Any]:
        """Return the noise z / sqrt(p) and floor(steps / p) steps, with p the density of the round."""
        schedule = config.schedule
        density = schedule.density(schedule.epoch(round_number))
        # A density of 1/10 is not a float: floor(10 / 0.1) must still be 100.
        steps = math.floor(config.steps_per_round / density * (1 + 1e-12))
        return {"noise_multiplier": noise_multiplier / math.sqrt(density), "steps": steps}


METHOD = MatchNoise()
