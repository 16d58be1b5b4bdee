"""Randomness that can be repeated: for simulations and tests alone, never beside real data."""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.coding import Values
from common.mask import Indices
from common.randomness import open_uniforms


@dataclass(slots=True)
class GeneratorRandomness:
    """The randomness of one round from two generators of NumPy: fast, repeatable, and not secret."""

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

    def open_uniforms(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` independent draws, uniform on (0, 1)."""
        return open_uniforms(lambda size: self.noise.integers(2**64, size=size, dtype=np.uint64), count)

    def module_seed(self) -> int:
        """Return a seed for what is random inside a module, such as dropout."""
        return int(self.sampling.integers(2**63))


@dataclass(frozen=True, slots=True)
class SeededRandomness:
    """The same (seed, site, round) gives the same batches and the same noise, in any process and any order."""

    seed: int
    site: int

    def for_round(self, run: str, round_number: int) -> GeneratorRandomness:
        """Return streams that depend on the round's number and not on the run's name."""
        return GeneratorRandomness(self._stream(b"sampling", round_number), self._stream(b"noise", round_number))

    def _stream(self, purpose: bytes, round_number: int) -> np.random.Generator:
        name = b"fedsieve/simulated/" + purpose + struct.pack("<QQQ", self.seed, self.site, round_number)
        return np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(name).digest()[:16], "little")))
