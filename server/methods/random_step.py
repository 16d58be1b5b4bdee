"""A mask for every step; a round's mask is their union."""

from common.config import RunConfig
from common.mask import MaskSpec
from server.methods.policy import MethodPolicy


class Policy(MethodPolicy):
    """Random sparsification with a mask for every step."""

    def __init__(self, config: RunConfig, size: int) -> None:
        super().__init__(config, size)
        self._kept: dict[int, int] = {}  # by round: the union must be drawn to be counted

    def kept(self, round_number: int) -> int:
        """Return the size of the union."""
        if round_number not in self._kept:
            self._kept[round_number] = self.mask(round_number).kept
        return self._kept[round_number]

    def mask(self, round_number: int) -> MaskSpec:
        """Return the union of the masks of the round's steps, each of the density that the schedule gives the epoch."""
        config, schedule = self.config, self.config.schedule
        drawn_kept = schedule.kept(schedule.epoch(round_number), self.size)
        first = (round_number - 1) * config.steps_per_round
        return MaskSpec.union_of_draws(config.seed, first, self.size, drawn_kept, config.steps_per_round)
