"""How often each parameter was masked out in a run, beside what independent random masks would do (Figure 12)."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from server.checkpoint import Checkpoint
from server.runfolder import RunFolder
from server.runlog import Event


@dataclass(slots=True)
class FrozenCount:
    """Follows a run and counts in how many rounds each parameter stayed what it was.

    With noise on every kept coordinate, a parameter that did not move by one bit was off the mask. A round is logged
    before its checkpoint is saved: the file then holds the model of the round before.
    """

    folder: Path
    densities: list[float] = field(default_factory=list)
    counts: NDArray[np.int64] | None = None
    _before: NDArray[np.float32] | None = None

    def follow(self, event: Event) -> None:
        """Take note of an event of the run log."""
        if event["event"] == "round":
            self._compare()
            self.densities.append(event["density"])
        elif event["event"] == "end":
            self._compare()

    def _compare(self) -> None:
        model = Checkpoint.load(RunFolder(self.folder).checkpoint).model
        if self._before is None:
            self.counts = np.zeros(model.size, np.int64)
        else:
            assert self.counts is not None, "made with the first model"
            self.counts += model == self._before
        self._before = model


def count_distribution(densities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that a parameter is off the mask 0, 1, ..., n times, for independent random masks.

    Computes: the Poisson binomial distribution with the probabilities 1 - density of the n rounds.
    """
    probabilities = np.ones(1)
    for density in densities:
        probabilities = np.convolve(probabilities, [density, 1 - density])
    return probabilities


def overlap(counts: NDArray[np.int64], densities: NDArray[np.float64]) -> float:
    """Return how much of the histogram of ``counts`` lies under that of independent random masks: 1 is all of it."""
    expected = count_distribution(densities)
    measured = np.bincount(counts, minlength=expected.size) / counts.size
    return float(np.minimum(measured, expected).sum())
