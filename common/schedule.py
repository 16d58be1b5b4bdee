"""How dense the mask of each epoch is."""

from dataclasses import dataclass
from typing import Literal

from common.errors import ConfigError
from common.mask import kept_count

ScheduleKind = Literal["constant", "cooling", "unfreezing"]


@dataclass(frozen=True, slots=True)
class DensitySchedule:
    """Density of epoch e of E.

    ``constant``: ``final_density`` in every epoch.
    ``cooling``: 1 - (1 - final_density) * min(e / (cooling_epochs - 1), 1): the first epoch is dense, epoch
    ``cooling_epochs`` - 1 and all later ones have the final density. A run with a single cooling epoch is at the
    final density at once, since its first epoch is also its last.
    ``unfreezing``: from ``first_density`` to ``final_density``, linearly until epoch ``cooling_epochs`` - 1.
    The first ``warmup_epochs`` are dense in every kind, and ``unfreezing`` begins after them.
    Source: random-sparsification, Algorithm 1 (cooling over the whole run); random-freeze (cooling time);
    adadpigu (progressive unfreezing).
    """

    kind: ScheduleKind
    final_density: float
    cooling_epochs: int
    rounds_per_epoch: int
    first_density: float = 1.0
    warmup_epochs: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.final_density <= 1:
            raise ConfigError(
                f"expected 0 < density <= 1, got density={self.final_density} (set 'final-density' in the run config)"
            )
        if self.cooling_epochs < 1:
            raise ConfigError(f"expected cooling_epochs >= 1, got {self.cooling_epochs}")
        if self.rounds_per_epoch < 1:
            raise ConfigError(f"expected 'rounds-per-epoch' >= 1, got {self.rounds_per_epoch}")
        if self.kind == "unfreezing" and not 0 < self.first_density <= self.final_density:
            raise ConfigError(
                f"expected 0 < first-density <= final-density={self.final_density}, got {self.first_density}: "
                "unfreezing makes the mask denser"
            )

    def epoch(self, round_number: int) -> int:
        """Return the epoch (from 0) of a round (from 1)."""
        return (round_number - 1) // self.rounds_per_epoch

    def density(self, epoch: int) -> float:
        """Return the density of ``epoch``."""
        if epoch < self.warmup_epochs:
            return 1.0
        if self.kind == "unfreezing":
            span = self.cooling_epochs - 1 - self.warmup_epochs
            progress = min((epoch - self.warmup_epochs) / span, 1.0) if span > 0 else 1.0
            return self.first_density + (self.final_density - self.first_density) * progress
        if self.kind == "constant" or self.cooling_epochs == 1:
            return self.final_density
        progress = min(epoch / (self.cooling_epochs - 1), 1.0)
        return 1.0 - (1.0 - self.final_density) * progress

    def kept(self, epoch: int, size: int) -> int:
        """Return how many of ``size`` coordinates the mask of ``epoch`` keeps."""
        return kept_count(size, self.density(epoch))
