"""Mask policies: which mask a round uses, from public or already released quantities alone."""

from dataclasses import dataclass

from common.mask import MaskSpec
from common.schedule import DensitySchedule


@dataclass(frozen=True, slots=True)
class RandomMasks:
    """Random sparsification: a fresh random mask for every epoch, of the density that the schedule gives it."""

    seed: int
    size: int
    schedule: DensitySchedule

    def mask(self, round_number: int) -> MaskSpec:
        """Return the mask of a round."""
        epoch = self.schedule.epoch(round_number)
        return MaskSpec(self.seed, epoch, self.size, self.schedule.kept(epoch, self.size))
