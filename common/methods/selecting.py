"""What the methods share by which a site chooses its coordinates by looking at its data, privately."""

import math
from typing import TYPE_CHECKING, Any, ClassVar

from common.charges import Charge
from common.errors import ConfigError
from common.methods.method import Method, Uploads
from common.schedule import DensitySchedule

if TYPE_CHECKING:
    from common.config import RunConfig
    from common.plan import RoundPlan

PAPER = "dp-selection-wide-networks"


class Selecting(Method):
    """Clip each record's gradient, choose coordinates of the batch's mean, clip again, noise on the chosen ones."""

    paper = f"{PAPER}, Algorithm 3"
    uploads: ClassVar[Uploads] = "indices and values"
    mechanism = "selection"
    server = "chosen"
    needs: ClassVar[tuple[str, ...]] = ()  # fields of the plan that must be above 0

    def check(self, config: "RunConfig") -> None:
        """Refuse momentum, which would move coordinates that were chosen before, and runs without privacy."""
        super().check(config)
        if not config.private:
            raise ConfigError(
                f"method={self.name} is about choosing privately: leave out private=false (--no-dp), or compare with "
                "method=dense --no-dp"
            )
        if config.client_momentum:
            raise ConfigError(
                f"method={self.name} uploads the chosen coordinates alone, and a velocity would move others: expected "
                f"client-momentum=0, got {config.client_momentum:g} (server-optimizer=momentum does the same)"
            )

    def check_plan(self, plan: "RoundPlan") -> None:
        """Refuse a plan whose choice would be free or impossible: the charge is computed from these very fields."""
        missing = [name for name in self.needs if not getattr(plan, name) > 0]
        if missing or plan.momentum or not plan.private:
            raise ConfigError(
                f"plan: expected a private plan without momentum and {' and '.join(self.needs) or 'nothing else'} > 0 "
                f"for method {self.name}, got private={plan.private}, momentum={plan.momentum}, "
                + ", ".join(f"{name}={getattr(plan, name)}" for name in self.needs)
            )

    def schedule(self, config: "RunConfig") -> DensitySchedule:
        """Return final-density for every epoch: to choose many coordinates costs more than to choose few."""
        return DensitySchedule("constant", config.final_density, 1, config.rounds_per_epoch)

    def plan_fields(self, config: "RunConfig", noise_multiplier: float, round_number: int) -> dict[str, Any]:
        """Return how coordinates are chosen and clipped; only what this way of choosing uses is not 0."""
        return {"second_clip_norm": config.second_clip_norm, "select_per": config.select_per}

    def selection_rho(self, plan: "RoundPlan") -> float:
        """Return what one choice of ``plan.mask_kept`` coordinates costs, in zCDP; 0: nothing."""
        return 0.0

    def charge(self, plan: "RoundPlan") -> Charge:
        """Return the cost of steps of which each, or the first of the round, chooses and adds noise on one sample."""
        rho = self.selection_rho(plan)
        selecting = 1 if rho and plan.select_per == "round" else 0
        return Charge(plan.noise_multiplier, plan.sampling_rate, plan.steps, rho, selecting_steps=selecting)

    def published_selection_epsilon(self, plan: "RoundPlan", delta: float) -> float:
        """Return what the paper says that one choice costs, at ``delta``."""
        return 0.0

    def published_epsilon(self, plan: "RoundPlan", rounds: int, declared_size: int, delta: float) -> float | None:
        """Return the paper's epsilon: (epsilon, delta) of choice and noise, times q, by strong composition.

        Computes: with T steps, d' = delta / (4 q T), e = q (e' + sqrt(2 log(1.25 / d')) / sigma), e' the choice's:
        T e (exp(e) - 1) + e sqrt(2 T log(2 / delta)). The paper's sigma is over min(S1 / b, S2).
        Guarantees: none. It takes half the sensitivity where the second clip is active, and amplification by q and
        the Gaussian mechanism's formula beyond epsilon 1, where neither holds.
        Edge cases: None for one choice a round, of which the paper does not speak.
        Source: dp-selection-wide-networks, Theorem 3 and its proof.
        """
        if plan.select_per != "step":
            return None
        steps, rate = rounds * plan.steps, plan.sampling_rate
        first = plan.clip_norm / (rate * declared_size)
        theirs = min(first, plan.second_clip_norm) if plan.second_clip_norm else first
        sigma = plan.noise_multiplier * self.sensitivity(plan, declared_size) / theirs
        part = min(delta / (4 * rate * steps), 0.5)
        one = rate * (self.published_selection_epsilon(plan, part) + math.sqrt(2 * math.log(1.25 / part)) / sigma)
        if one > 700:
            return math.inf
        return steps * one * math.expm1(one) + one * math.sqrt(2 * steps * math.log(2 / delta))

    def sensitivity(self, plan: "RoundPlan", declared_size: int) -> float:
        """Return how far a record moves the chosen coordinates of the mean, after the second clip.

        Computes: min(S1 / b, 2 S2), with S1 the clip norm, b the expected batch and S2 the second clip norm (0: none).
        Source: a projection onto a ball moves no two points apart, and no two points of it are more than 2 S2 apart.
        dp-selection-wide-networks takes min(S1 / b, S2), which one record that turns the mean around exceeds.
        """
        first = plan.clip_norm / (plan.sampling_rate * declared_size)
        return min(first, 2 * plan.second_clip_norm) if plan.second_clip_norm else first

    def noise_std(self, plan: "RoundPlan", declared_size: int) -> float:
        """Return the least noise that a released value has: that of one step, or of all where one choice holds."""
        steps = plan.steps if plan.select_per == "round" else 1
        return plan.learning_rate * plan.noise_multiplier * self.sensitivity(plan, declared_size) * math.sqrt(steps)

    def most_values(self, plan: "RoundPlan") -> int:
        """Return how many coordinates a round can touch."""
        choices = plan.steps if plan.select_per == "step" else 1
        return min(plan.mask_size, choices * plan.mask_kept)
