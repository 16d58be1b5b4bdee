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
from common.integers import Integers
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
        self._masks_held: dict[int, str] = {}  # by site: the chosen mask that it last answered under
        # For the current version and mask: by the version that it starts from, and the chosen mask that is held.
        self._written: dict[tuple[int | None, str | None, bool], bytes] = {}
        self._encoded: bytes | None = None  # the current version as a whole, once it has been asked for
        self._current = -1
        self._mask: MaskSpec | None = None
        self._reference: Values | None = None
        self.reference_digest = ""

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
        self._encoded = None
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

    def use_mask(self, mask: MaskSpec) -> None:
        """Have the coming round use ``mask``: one that was chosen goes with the model to whoever does not hold it."""
        self._mask = mask
        self._written.clear()

    def use_reference(self, model: Values | None) -> None:
        """Have every site hold ``model``, a broadcast model, besides the current one."""
        self._reference = model
        self.reference_digest = "" if model is None else digest_of(model)

    def confirm(self, site: int) -> None:
        """Note that a site holds the current broadcast model, and the mask and the reference with it."""
        self._confirmed[site] = self._current
        if self._mask is not None and self._mask.chosen:
            self._masks_held[site] = self._mask.chosen

    def forget(self, site: int) -> None:
        """Note that a site does not hold what it was thought to hold."""
        self._confirmed.pop(site, None)
        self._masks_held.pop(site, None)

    def bytes_for(self, site: int) -> bytes:
        """Return what brings a site to the current model; sites that hold the same get the same object."""
        base, held = self._confirmed.get(site), self._masks_held.get(site)
        reference = b"" if base is not None else self._reference_block()
        if base not in self._versions:
            base = None
        key = (base, held, bool(reference))
        if key not in self._written:
            self._written[key] = self._mask_block(held) + reference + self._from(base, held)
        return self._written[key]

    def _mask_block(self, held: str | None) -> bytes:
        if self._mask is None or not self._mask.chosen or self._mask.chosen == held:
            return b""
        return broadcast.encode_mask(self._mask)

    def _reference_block(self) -> bytes:
        """Return the reference for a site that has not answered yet; nothing where it is the current model."""
        if self._reference is None or self.reference_digest == self.digest:
            return b""
        if self.step:
            numbers = to_grid(self._reference, self.step)
            if np.array_equal(from_grid(numbers, self.step), self._reference):
                return broadcast.encode_reference(broadcast.encode_grid(numbers))
        floats = broadcast.encode_floats(self._reference, "f16" if self._coding == "f16" else "f32")
        return broadcast.encode_reference(floats)

    @staticmethod
    def parts_of(data: bytes) -> PartBytes:
        """Return what the parts of ``bytes_for`` cost."""
        return broadcast.parts_of(data)

    def _from(self, base: int | None, held: str | None) -> bytes:
        now = self._versions[self._current]
        if base == self._current:
            return broadcast.encode_held(now.digest)
        if now.numbers is None:
            return broadcast.encode_floats(now.model, "f16" if self._coding == "f16" else "f32")
        deltas = [] if base is None else self._deltas(base, now.numbers, held)
        return min([self._whole(now.numbers), *deltas], key=len)

    def _whole(self, numbers: Integers) -> bytes:
        if self._encoded is None:
            self._encoded = broadcast.encode_grid(numbers)
        return self._encoded

    def _deltas(self, base: int, numbers: Integers, held: str | None) -> list[bytes]:
        """Return the ways to write the difference from version ``base``; none where that one is not on the grid.

        On the union of the masks since then where the site can draw them, or holds the only one. Else, on all
        coordinates, or on those that have moved: which of them is shorter depends on how many those are.
        """
        start = self._versions[base]
        if start.numbers is None:
            return []
        between = [self._versions[version].mask for version in range(base + 1, self._current + 1)]
        masks = list(dict.fromkeys(mask for mask in between if mask is not None))  # rounds of an epoch share theirs
        if None not in between and len(masks) == 1 and masks[0].chosen and masks[0].chosen == held:
            moved = masks[0].indices()
            return [broadcast.encode_chosen_delta(start.digest, masks[0], numbers[moved] - start.numbers[moved])]
        known = None not in between and all(mask.is_one_draw for mask in masks)
        union = union_of(masks, numbers.size) if known else None
        if union is not None:
            return [broadcast.encode_delta(start.digest, masks, numbers[union] - start.numbers[union])]
        difference = numbers - start.numbers
        everywhere = broadcast.encode_delta(start.digest, (), difference)
        return [everywhere] if known else [everywhere, broadcast.encode_scattered_delta(start.digest, difference)]
