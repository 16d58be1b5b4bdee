"""Random sparsification with a mask for every step: an ablation of the mask's life."""

from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.methods.method import Method
from common.noise import release_noise_std

if TYPE_CHECKING:
    from common.config import RunConfig
    from common.plan import RoundPlan


class RandomStep(Method):
    """A fresh mask for every step; what is uploaded is the union of a round's masks."""

    name = "random-step"
    title = "ablation: a fresh random mask every step; the union of a round's masks travels"
    paper = "random-sparsification (masks per iteration)"
    about = (
        "As random, with a mask of its own for every step. A coordinate then moves in some steps of a round and rests "
        "in others, and the upload covers the union of all masks, which is what a mask that lives for an epoch saves. "
        "Values are coded on the grid of a single step's noise, the least that any has."
    )
    mechanism = "random_step"
    server = "random_step"

    def check(self, config: "RunConfig") -> None:
        """Refuse momentum: a velocity would move coordinates off the mask of its step."""
        super().check(config)
        if config.client_momentum:
            raise ConfigError(
                f"method={self.name} has a mask for every step, off which a velocity would move: expected "
                f"client-momentum=0, got {config.client_momentum}"
            )

    def noise_std(self, plan: "RoundPlan", declared_size: int) -> float:
        """Return the noise of one step: a coordinate of the union was kept in one step at least."""
        return release_noise_std(
            noise_multiplier=plan.noise_multiplier,
            clip_norm=plan.clip_norm,
            learning_rate=plan.learning_rate,
            sampling_rate=plan.sampling_rate,
            steps=1,
            momentum=0.0,
            declared_size=declared_size,
        )


METHOD = RandomStep()
