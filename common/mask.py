"""Masks: which coordinates move, derived by every side from one public seed, or chosen by the server and named."""

import hashlib
import math
import struct
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, ModelMissing

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
    """A mask by name: all that is needed to draw it anywhere, or to know it again.

    ``seed`` is public, ``epoch`` counts from 0, ``size`` is d, ``kept`` is k. Two kinds are not drawn as one subset:
    a mask that the server has chosen is known by the digest ``chosen`` of its indices, which travel once (``hold``
    keeps them); and the union of ``draws`` random masks of ``drawn_kept`` each, of the epochs from ``epoch`` on.
    """

    seed: int
    epoch: int
    size: int
    kept: int
    chosen: str = ""
    draws: int = 1
    drawn_kept: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"expected 0 <= seed < 2^63, got seed={self.seed} (set 'seed' in the run config)")
        if not 0 <= self.epoch < 2**32:
            raise ConfigError(f"expected 0 <= epoch < 2^32, got epoch={self.epoch}")
        if not 1 <= self.kept <= self.size < _MAX_SIZE:
            raise ConfigError(f"expected 1 <= kept <= size < 2^32, got kept={self.kept}, size={self.size}")
        if self.draws > 1 and not 1 <= self.drawn_kept <= self.kept:
            raise ConfigError(f"expected 1 <= drawn_kept <= kept={self.kept}, got drawn_kept={self.drawn_kept}")

    @classmethod
    def union_of_draws(cls, seed: int, epoch: int, size: int, drawn_kept: int, draws: int) -> "MaskSpec":
        """Return the union of ``draws`` random masks of ``drawn_kept`` each."""
        if draws == 1 or drawn_kept == size:
            return cls(seed, epoch, size, drawn_kept)
        kept = int(_union(tuple(cls(seed, epoch + draw, size, drawn_kept) for draw in range(draws))).size)
        return cls(seed, epoch, size, kept, draws=draws, drawn_kept=drawn_kept)

    @property
    def is_one_draw(self) -> bool:
        """Whether seed, epoch, size and kept say it all."""
        return not self.chosen and self.draws == 1

    def parts(self) -> tuple["MaskSpec", ...]:
        """Return the random masks of which it is the union: itself where it is one draw."""
        if self.draws == 1:
            return (self,)
        return tuple(MaskSpec(self.seed, self.epoch + draw, self.size, self.drawn_kept) for draw in range(self.draws))

    def digest(self) -> int:
        """Return 32 bits of a hash of the mask's name, for the header of a release."""
        return int.from_bytes(self._hash()[-4:], "little")

    def indices(self) -> Indices:
        """Return the kept coordinates, sorted; the array is shared and read-only.

        Computes: the ``kept`` smallest of ``size`` 64-bit words of Philox4x64-10 with a zero counter, keyed by the
        first 128 bits of SHA-256(tag, seed, epoch, size); equal words are taken in order of their index.
        Guarantees: exactly ``kept`` distinct indices; uniform over all subsets of that size; independent of data;
        the same on every machine and NumPy version (raw Philox words are part of NumPy's stability promise).
        Edge cases: raises ModelMissing where the mask was chosen and is not held here, ConfigError where a union is
        not as large as it says.
        """
        if self.chosen:
            return _held(self)
        if self.draws == 1:
            return _draw(self)
        union = _union(self.parts())
        if union.size != self.kept:
            raise ConfigError(f"expected a union of {self.kept} coordinates, got {union.size}")
        return union

    def _hash(self) -> bytes:
        name = _PROTOCOL_TAG + struct.pack("<QQQQ", self.seed, self.epoch, self.size, self.kept)
        if not self.is_one_draw:
            name += struct.pack("<QQ", self.draws, self.drawn_kept) + self.chosen.encode()
        return hashlib.sha256(name).digest()

    def _key(self) -> int:
        # `kept` stays out of the key: with the same seed and epoch a denser mask contains every sparser one.
        name = _PROTOCOL_TAG + struct.pack("<QQQ", self.seed, self.epoch, self.size)
        return int.from_bytes(hashlib.sha256(name).digest()[:16], "little")


_HELD: OrderedDict[str, Indices] = OrderedDict()  # masks that were chosen, by digest; the latest used stay
_MOST_HELD = 16


def hold(indices: Indices) -> str:
    """Keep a mask that was chosen, in this process, and return its digest: 64 bits of SHA-256, 16 hexadecimal digits.

    It is known by its content, so that whoever asks for a digest gets that mask or none.
    """
    digest = hashlib.sha256(np.ascontiguousarray(indices, "<i8").data).hexdigest()[:16]
    if digest not in _HELD:
        kept = np.array(indices, np.int64)
        kept.setflags(write=False)
        _HELD[digest] = kept
        while len(_HELD) > _MOST_HELD:
            _HELD.popitem(last=False)
    _HELD.move_to_end(digest)
    return digest


def held_mask(digest: str) -> Indices | None:
    """Return the mask of that digest, if it is held."""
    if digest in _HELD:
        _HELD.move_to_end(digest)
    return _HELD.get(digest)


def let_go() -> None:
    """Forget all masks that were chosen, as a restart does."""
    _HELD.clear()


def _held(spec: MaskSpec) -> Indices:
    indices = held_mask(spec.chosen)
    if indices is None:
        raise ModelMissing(f"the mask {spec.chosen} is not held here")
    if indices.size != spec.kept or indices[-1] >= spec.size:
        raise ConfigError(f"the mask {spec.chosen} does not keep {spec.kept} of {spec.size} coordinates")
    return indices


@lru_cache(maxsize=2)
def _union(masks: tuple[MaskSpec, ...]) -> Indices:
    kept = np.zeros(masks[0].size, np.bool_)
    for mask in masks:
        kept[mask.indices()] = True
    indices = np.flatnonzero(kept)
    indices.setflags(write=False)
    return indices


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
