"""How dense the mask of each epoch is."""

from dataclasses import dataclass
from typing import Literal

from common.errors import ConfigError
from common.mask import kept_count

ScheduleKind = Literal["constant", "cooling"]


@dataclass(frozen=True, slots=True)
class DensitySchedule:
    """Density of epoch e of E.

    ``constant``: ``final_density`` in every epoch.
    ``cooling``: 1 - (1 - final_density) * min(e / (cooling_epochs - 1), 1): the first epoch is dense, epoch
    ``cooling_epochs`` - 1 and all later ones have the final density. A run with a single cooling epoch is at the
    final density at once, since its first epoch is also its last.
    Source: random-sparsification, Algorithm 1 (cooling over the whole run); random-freeze (cooling time).
    """

    kind: ScheduleKind
    final_density: float
    cooling_epochs: int
    rounds_per_epoch: int

    def __post_init__(self) -> None:
        if not 0 < self.final_density <= 1:
            raise ConfigError(
                f"expected 0 < density <= 1, got density={self.final_density} (set 'final-density' in the run config)"
            )
        if self.cooling_epochs < 1:
            raise ConfigError(f"expected cooling_epochs >= 1, got {self.cooling_epochs}")
        if self.rounds_per_epoch < 1:
            raise ConfigError(f"expected 'rounds-per-epoch' >= 1, got {self.rounds_per_epoch}")

    def epoch(self, round_number: int) -> int:
        """Return the epoch (from 0) of a round (from 1)."""
        return (round_number - 1) // self.rounds_per_epoch

    def density(self, epoch: int) -> float:
        """Return the density of ``epoch``."""
        if self.kind == "constant" or self.cooling_epochs == 1:
            return self.final_density
        progress = min(epoch / (self.cooling_epochs - 1), 1.0)
        return 1.0 - (1.0 - self.final_density) * progress

    def kept(self, epoch: int, size: int) -> int:
        """Return how many of ``size`` coordinates the mask of ``epoch`` keeps."""
        return kept_count(size, self.density(epoch))
