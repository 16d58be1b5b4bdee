"""Randomness that can be repeated: for simulations and tests alone, never beside real data."""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from client.randomness import RoundRandomness


@dataclass(frozen=True, slots=True)
class SeededRandomness:
    """The same (seed, site, round) gives the same batches and the same noise, in any process and any order."""

    seed: int
    site: int

    def for_round(self, run: str, round_number: int) -> RoundRandomness:
        """Return streams that depend on the round's number and not on the run's name."""
        return RoundRandomness(self._stream(b"sampling", round_number), self._stream(b"noise", round_number))

    def _stream(self, purpose: bytes, round_number: int) -> np.random.Generator:
        name = b"fedsieve/simulated/" + purpose + struct.pack("<QQQ", self.seed, self.site, round_number)
        return np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(name).digest()[:16], "little")))
