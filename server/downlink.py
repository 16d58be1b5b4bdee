"""The downlink: which model the sites are given, and the fewest bytes that bring each of them there.

With ``calibrated`` coding the broadcast model is the server's own, rounded to a grid that is about as fine as the noise
of one round. The server keeps its own in full precision, so that what one rounding takes away the next one gives back
(error feedback), and rounding errors do not add up over rounds. A coordinate off the mask does not move in either.
"""

from dataclasses import dataclass

import numpy as np

from common import broadcast
from common.broadcast import MOST_STEPS, digest_of, union_of
from common.coding import ModelCoding, PartBytes, Values, from_grid, to_grid
from common.integers import Integers, estimated_bits
from common.mask import MaskSpec

_HISTORY = 8  # versions: farther back a difference is hardly smaller than the whole model


@dataclass(frozen=True, slots=True)
class _Version:
    """A model as it was broadcast, and the mask on which it differs from the one before."""

    model: Values
    numbers: Integers | None  # on the grid; None where it is not on one
    digest: str
    mask: MaskSpec | None


class Downlink:
    """Publishes models, remembers what each site has confirmed, and writes what each site needs."""

    def __init__(self, coding: ModelCoding, grid_step: float) -> None:
        self._coding = coding
        self._grid_step = grid_step
        self._versions: dict[int, _Version] = {}
        self._confirmed: dict[int, int] = {}
        self._written: dict[int | None, bytes] = {}  # for the current version, by the version that it starts from
        self._current = -1

    def publish(self, model: Values, version: int, mask: MaskSpec | None) -> None:
        """Make ``model`` the current one; it differs from the version before on ``mask`` alone (None: anywhere)."""
        numbers = None
        if self._coding == "calibrated":
            steps = to_grid(model, self._grid_step)
            # A model that has run away does not fit the grid: it travels as floats.
            if np.abs(steps, dtype=np.int64).max() < MOST_STEPS:
                numbers, model = steps, from_grid(steps, self._grid_step)
        elif self._coding == "f16":
            limit = np.float32(np.finfo(np.float16).max)
            model = np.clip(model, -limit, limit).astype(np.float16).astype(np.float32)
        self._current = version
        self._versions[version] = _Version(model, numbers, digest_of(model), mask)
        self._versions.pop(version - _HISTORY, None)
        self._written.clear()

    @property
    def model(self) -> Values:
        """The current broadcast model: what every site starts from."""
        return self._versions[self._current].model

    @property
    def digest(self) -> str:
        """The current broadcast model's name."""
        return self._versions[self._current].digest

    @property
    def step(self) -> float:
        """The step of the grid that the current broadcast model lies on; 0 for none."""
        return 0.0 if self._versions[self._current].numbers is None else self._grid_step

    def confirm(self, site: int) -> None:
        """Note that a site holds the current broadcast model."""
        self._confirmed[site] = self._current

    def forget(self, site: int) -> None:
        """Note that a site does not hold what it was thought to hold."""
        self._confirmed.pop(site, None)

    def bytes_for(self, site: int) -> bytes:
        """Return what brings a site to the current model; sites that hold the same get the same object."""
        base = self._confirmed.get(site)
        if base not in self._versions:
            base = None
        if base not in self._written:
            self._written[base] = self._from(base)
        return self._written[base]

    @staticmethod
    def parts_of(data: bytes) -> PartBytes:
        """Return what the parts of ``bytes_for`` cost."""
        return broadcast.parts_of(data)

    def _from(self, base: int | None) -> bytes:
        now = self._versions[self._current]
        if base == self._current:
            return broadcast.encode_held(now.digest)
        if now.numbers is None:
            return broadcast.encode_floats(now.model, "f16" if self._coding == "f16" else "f32")
        delta = None if base is None else self._delta(base, now.numbers)
        return broadcast.encode_grid(now.numbers) if delta is None else delta

    def _delta(self, base: int, numbers: Integers) -> bytes | None:
        """Return the difference from version ``base``, or None where the whole model is smaller."""
        start = self._versions[base]
        if start.numbers is None:
            return None
        between = [self._versions[version].mask for version in range(base + 1, self._current + 1)]
        masks = list(dict.fromkeys(mask for mask in between if mask is not None))  # rounds of an epoch share theirs
        union = None if None in between else union_of(masks, numbers.size)
        difference = numbers - start.numbers if union is None else numbers[union] - start.numbers[union]
        if estimated_bits(difference) >= estimated_bits(numbers):
            return None
        return broadcast.encode_delta(start.digest, () if union is None else masks, difference)
