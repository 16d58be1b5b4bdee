"""Where a site's secret randomness comes from: which records a step samples, and the noise that hides them.

Sampling and noise use streams of their own, neither related to the public seed of the mask.
"""

import secrets
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.coding import Values
from common.mask import Indices


@dataclass(slots=True)
class RoundRandomness:
    """The randomness of one round at one site."""

    sampling: np.random.Generator
    noise: np.random.Generator

    def poisson_sample(self, size: int, sampling_rate: float) -> Indices:
        """Return the records of a step: each of ``size`` is in it with probability ``sampling_rate``, independently."""
        if sampling_rate == 1:
            return np.arange(size, dtype=np.int64)
        return np.flatnonzero(self.sampling.random(size) < sampling_rate).astype(np.int64, copy=False)

    def standard_normal(self, count: int) -> Values:
        """Return ``count`` independent draws of N(0, 1)."""
        return self.noise.standard_normal(count, dtype=np.float32)

    def module_seed(self) -> int:
        """Return a seed for what is random inside a module, such as dropout."""
        return int(self.sampling.integers(2**63))


class Randomness(Protocol):
    """A site's source of randomness."""

    def for_round(self, run: str, round_number: int) -> RoundRandomness:
        """Return the randomness of a round."""
        ...


class OsRandomness:
    """Fresh keys from the operating system for every round; nothing repeats and nothing can be replayed."""

    def for_round(self, run: str, round_number: int) -> RoundRandomness:
        """Return streams under new 128-bit keys."""
        return RoundRandomness(
            np.random.Generator(np.random.Philox(key=secrets.randbits(128))),
            np.random.Generator(np.random.Philox(key=secrets.randbits(128))),
        )
