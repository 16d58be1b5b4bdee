"""Masks: which coordinates move during an epoch, derived by every side from one public seed."""

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError

Indices = NDArray[np.int64]

_PROTOCOL_TAG = b"fedsieve/mask/1"
_MAX_SIZE = 2**32


def kept_count(size: int, density: float) -> int:
    """Return k = round(density * size), at least 1: a mask that keeps nothing teaches nothing."""
    if not 0 < density <= 1:
        raise ConfigError(f"expected 0 < density <= 1, got density={density} (set 'final-density' in the run config)")
    return max(1, round(density * size))


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """A random mask by name: all that is needed to draw it anywhere.

    ``seed`` is public, ``epoch`` counts from 0, ``size`` is d, ``kept`` is k.
    """

    seed: int
    epoch: int
    size: int
    kept: int

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"expected 0 <= seed < 2^63, got seed={self.seed} (set 'seed' in the run config)")
        if not 0 <= self.epoch < 2**32:
            raise ConfigError(f"expected 0 <= epoch < 2^32, got epoch={self.epoch}")
        if not 1 <= self.kept <= self.size < _MAX_SIZE:
            raise ConfigError(f"expected 1 <= kept <= size < 2^32, got kept={self.kept}, size={self.size}")

    def digest(self) -> int:
        """Return 32 bits of a hash of the mask's name, for the header of a release."""
        return int.from_bytes(self._hash()[-4:], "little")

    def indices(self) -> Indices:
        """Return the kept coordinates, sorted; the array is shared and read-only.

        Computes: the ``kept`` smallest of ``size`` 64-bit words of Philox4x64-10 with a zero counter, keyed by the
        first 128 bits of SHA-256(tag, seed, epoch, size); equal words are taken in order of their index.
        Guarantees: exactly ``kept`` distinct indices; uniform over all subsets of that size; independent of data;
        the same on every machine and NumPy version (raw Philox words are part of NumPy's stability promise).
        """
        return _draw(self)

    def _hash(self) -> bytes:
        return hashlib.sha256(
            _PROTOCOL_TAG + struct.pack("<QQQQ", self.seed, self.epoch, self.size, self.kept)
        ).digest()

    def _key(self) -> int:
        # `kept` stays out of the key: with the same seed and epoch a denser mask contains every sparser one.
        name = _PROTOCOL_TAG + struct.pack("<QQQ", self.seed, self.epoch, self.size)
        return int.from_bytes(hashlib.sha256(name).digest()[:16], "little")


@lru_cache(maxsize=2)
def _draw(spec: MaskSpec) -> Indices:
    if spec.kept == spec.size:
        indices = np.arange(spec.size, dtype=np.int64)
    else:
        words = np.random.Philox(key=spec._key(), counter=0).random_raw(spec.size)
        threshold = _kth_smallest(words, spec.kept)
        indices = np.flatnonzero(words <= threshold)
        if indices.size > spec.kept:  # ties at the threshold: the earliest of them stay
            ties = np.flatnonzero(words == threshold)
            surplus = ties[ties.size - (indices.size - spec.kept) :]
            indices = np.setdiff1d(indices, surplus, assume_unique=True)
        indices = indices.astype(np.int64, copy=False)
    indices.setflags(write=False)
    return indices


def _kth_smallest(words: NDArray[np.uint64], kth: int) -> np.uint64:
    """Return the ``kth`` smallest (from 1) of uniform words.

    It lies within 8 standard deviations of where uniform words put it, so a partition of that narrow band nearly
    always does; a partition of all words, several times slower, serves where it does not.
    """
    fraction = kth / words.size
    spread = 8 * math.sqrt(fraction * (1 - fraction) / words.size)
    low = np.uint64(int(max(0.0, fraction - spread) * (2**64 - 2**11)))
    high = np.uint64(int(min(1.0, fraction + spread) * (2**64 - 2**11)))
    before = int(np.count_nonzero(words < low))
    band = words[(words >= low) & (words <= high)]
    rank = kth - 1 - before
    if not 0 <= rank < band.size:
        rank, band = kth - 1, words
    return np.uint64(np.partition(band, rank)[rank])
