"""AdaDPIGU, corrected: importance from released updates, standardised gradients, progressive unfreezing."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.coding import Values
from common.errors import ConfigError
from common.methods.method import Method
from common.schedule import DensitySchedule

if TYPE_CHECKING:
    from common.config import RunConfig
    from common.plan import RoundPlan


class Importance(Method):
    """A private warm-up ranks the coordinates; the best of them train, more and more of them, standardised."""

    name = "importance"
    title = "a private warm-up ranks the coordinates; the best train, standardised, and more thaw"
    paper = "adadpigu, Algorithms 1 and 2, with scores from released updates"
    about = (
        "The first warmup-epochs are ordinary DP-SGD and part of the budget. The importance of a coordinate is the "
        "mean size of its released, noisy updates there; the best first-density of the coordinates train then, and the "
        "mask grows to final-density. After the warm-up a record's gradient is standardised before the clip, "
        "(g - alpha) / sqrt(beta), and what was released is restored after the noise. Server and sites compute alpha "
        "and beta from two broadcast models, the first and the current one, so that neither travels: any site that can "
        "train at all holds both. The published form scores gradients before the noise, which breaks its guarantee: "
        "here released updates are scored. It masks every record by itself, which is private, since its noise falls on "
        "all coordinates, but saves neither noise nor bytes: here all records share a mask. It travels down once per "
        "epoch."
    )
    needs_noise = True
    has_reference = True
    mechanism = "importance"
    server = "importance"

    def check(self, config: "RunConfig") -> None:
        """Refuse a run that is all warm-up, or has none."""
        super().check(config)
        epochs = -(-config.rounds // config.rounds_per_epoch)
        if not 1 <= config.warmup_epochs < epochs:
            raise ConfigError(
                f"method={self.name} needs at least one of the {epochs} epochs for its warm-up and one after it: "
                f"got warmup-epochs={config.warmup_epochs}"
            )

    def schedule(self, config: "RunConfig") -> DensitySchedule:
        """Return dense warm-up epochs, then first-density rising to final-density."""
        epochs = -(-config.rounds // config.rounds_per_epoch)
        return DensitySchedule(
            "unfreezing",
            config.final_density,
            config.cooling_epochs or epochs,
            config.rounds_per_epoch,
            config.first_density,
            config.warmup_epochs,
        )

    def plan_fields(self, config: "RunConfig", noise_multiplier: float, round_number: int) -> dict[str, Any]:
        """Return whether the round comes after the warm-up."""
        return {"standardised": config.schedule.epoch(round_number) >= config.warmup_epochs}


def standardisation(model: Values, reference: Values, plan: "RoundPlan") -> tuple[Values, Values]:
    """Return alpha and sqrt(beta), the mean and the spread by which gradients are standardised, each (d,).

    Computes, with D = ``model`` - ``reference``, the way from the first broadcast model over T = steps * (round - 1)
    noisy steps: alpha = -D / (learning_rate T), the mean released gradient; D^2 / (learning_rate^2 T), which estimates
    the second moment of a step, pooled half and half with its mean over all coordinates, over that mean: beta. So beta
    is 1 on average and 1/2 at least, which bounds sqrt(beta) from below without another constant.
    Guarantees: a function of broadcast models and of the plan, hence of released quantities alone; the same bits on
    every machine (the one sum is exactly rounded, the rest is one IEEE operation per coordinate at a time).
    Edge cases: models that do not differ, or numbers too large or too small, give alpha 0 and sqrt(beta) 1.
    Source: adadpigu, Algorithm 2; its running means are replaced by what everyone can compute.
    """
    steps = plan.steps * (plan.round - 1)
    moved = model.astype(np.float64) - reference
    squares = moved * moved
    mean = math.fsum(squares) / squares.size if np.isfinite(squares).all() else math.inf
    if not steps or not 1e-60 < mean < 1e60:
        return np.zeros(model.size, np.float32), np.ones(model.size, np.float32)
    alpha: Values = (moved / (-plan.learning_rate * steps)).astype(np.float32)
    spread: NDArray[np.float64] = np.sqrt(0.5 * (squares / mean) + 0.5)
    return alpha, spread.astype(np.float32)


def restored(values: Values, alpha: Values, spread: Values, plan: "RoundPlan") -> Values:
    """Return the movement that standardised ``values`` stand for; alpha and spread are those of their coordinates."""
    return (values.astype(np.float64) * spread - _reach(plan) * alpha).astype(np.float32)


def standardised(moved: Values, alpha: Values, spread: Values, plan: "RoundPlan") -> Values:
    """Return the values that ``restored`` maps to ``moved``: their noise has the std of ``Method.noise_std``."""
    return ((moved.astype(np.float64) + _reach(plan) * alpha) / spread).astype(np.float32)


def _reach(plan: "RoundPlan") -> float:
    """Return how far a gradient of 1 in every step moves a parameter in a round, the velocity included."""
    reach, total = 0.0, 0.0
    for _ in range(plan.steps):
        reach = 1.0 + plan.momentum * reach
        total += reach
    return plan.learning_rate * total


METHOD = Importance()
