"""What the server's side of a method does; the defaults are those of values on a shared mask."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.coding import Values
from common.config import RunConfig
from common.mask import Indices, MaskSpec
from common.plan import RoundPlan
from server.admission import AdmittedUpdate
from server.aggregate import weighted_mean


class MethodPolicy:
    """Chooses masks and combines releases. ``state`` holds every array that must survive a restart of the server."""

    def __init__(self, config: RunConfig, size: int) -> None:
        self.config = config
        self.size = size
        self.state: dict[str, NDArray[Any]] = {}

    def kept(self, round_number: int) -> int:
        """Return how many coordinates move in a round."""
        schedule = self.config.schedule
        return schedule.kept(schedule.epoch(round_number), self.size)

    def mask(self, round_number: int) -> MaskSpec:
        """Return the mask of a round: the same whenever it is asked, also after a restart from ``state``."""
        epoch = self.config.schedule.epoch(round_number)
        return MaskSpec(self.config.seed, epoch, self.size, self.kept(round_number))

    @property
    def reference(self) -> Values | None:
        """A broadcast model that sites need besides the current one; None for none."""
        return None

    def begin(self, model: Values) -> None:
        """Take in the first broadcast model, once, when a run begins and not when it is resumed."""

    def combine(
        self, plan: RoundPlan, updates: Sequence[tuple[AdmittedUpdate, float]], model: Values
    ) -> tuple[Indices, Values]:
        """Return the coordinates that move, sorted, and the mean update there.

        ``updates`` come with their weights; ``model`` is the broadcast model that they started from.
        """
        return plan.mask.indices(), weighted_mean([(update.values, weight) for update, weight in updates])

    def learn(self, plan: RoundPlan, indices: Indices, update: Values, noise_std: float) -> None:
        """Take in what a round released, as ``combine`` returned it: for the masks of later rounds.

        ``noise_std`` is that of the noise in each value of ``update``, as far as ``Method.noise_std`` says.
        """


def scattered_mean(updates: Sequence[tuple[Indices, Values, float]], size: int) -> tuple[Indices, Values]:
    """Return the coordinates that any update speaks of, and there the weighted mean, absent values being zeros.

    Summed in float64 in the order given: the same updates in the same order give the same bits.
    """
    total = np.zeros(size, np.float64)
    touched = np.zeros(size, np.bool_)
    for indices, values, weight in updates:
        total[indices] += values.astype(np.float64) * weight
        touched[indices] = True
    union = np.flatnonzero(touched)
    return union, (total[union] / sum(weight for *_, weight in updates)).astype(np.float32)
