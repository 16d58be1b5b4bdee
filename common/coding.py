"""A sparse update as bytes: index coding x value coding, and what each part cost.

Layout: a fixed little-endian header, then the index part, then the value part.

====================  ======  =========================================================================
field                 bytes   meaning
====================  ======  =========================================================================
magic                 4       ``FSVU``
version               1       1
index coding          1       0 ``seed`` (the mask of the plan: nothing travels), 1 ``raw`` (uint32),
                              2 ``compact`` (``common.indices``)
value coding          1       0 ``f32``, 1 ``f16``, 2 ``int8`` (a float32 scale, then one byte a value),
                              3 ``calibrated`` (integers on a grid that both sides know: ``common.integers``)
reserved              1       0
round                 4       the round that it answers
model version         4       the model that it started from
mask digest           4       ``MaskSpec.digest`` of the mask it was made under
size                  4       d
kept                  4       k, the number of values
index bytes           4       length of the index part
value bytes           4       length of the value part
checksum              4       CRC-32 of everything else, started with that of the grid's step (``calibrated``)
====================  ======  =========================================================================

Every length is checked against the plan before anything is allocated. Coding comes after the noise: it is
post-processing and costs no privacy.

``calibrated`` rounds a value to the nearest multiple of ``grid_step`` = grid * s, with s the std of the noise in a
released coordinate (``common.noise.release_noise_std``). The rounding error is at most half a step; the noise acts as
its dither, so it has mean zero (up to exp(-2 pi^2 / grid^2)) and adds grid^2 / 12 to the variance s^2. Values
that carry no noise yet, where the server adds it, are put on the grid by ``rounded_at_random`` first.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from common.errors import WireError
from common.indices import decode_indices, encode_indices
from common.integers import Integers, decode_integers, encode_integers, largest_bytes
from common.mask import Indices

Values = NDArray[np.float32]
ValueCoding = Literal["f32", "f16", "int8", "calibrated"]
IndexCoding = Literal["seed", "raw", "compact"]
ModelCoding = Literal["calibrated", "f32", "f16"]

_MAGIC = b"FSVU"
_VERSION = 1
_HEADER = struct.Struct("<4sBBBBIIIIIII")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size

_INDEX_CODES: dict[IndexCoding, int] = {"seed": 0, "raw": 1, "compact": 2}
_VALUE_CODES: dict[ValueCoding, int] = {"f32": 0, "f16": 1, "int8": 2, "calibrated": 3}
_INDEX_NAMES = {code: name for name, code in _INDEX_CODES.items()}
_VALUE_NAMES = {code: name for name, code in _VALUE_CODES.items()}
_INT8_SCALE = struct.Struct("<f")
_GRID_STEP = struct.Struct("<d")
_NOT_FINITE = -(2**31)  # what a value that is no number is on the grid: it arrives as NaN


@dataclass(frozen=True, slots=True)
class SparseUpdate:
    """Values on kept coordinates. ``indices`` is None where they are the shared mask's, else sorted and unique."""

    round: int
    model_version: int
    mask_digest: int
    size: int
    values: Values
    indices: Indices | None = None


@dataclass(frozen=True, slots=True)
class PartBytes:
    """What a message cost, part by part."""

    index: int = 0
    values: int = 0
    header: int = 0
    framing: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return self.index + self.values + self.header + self.framing

    def __add__(self, other: "PartBytes") -> "PartBytes":
        return PartBytes(
            self.index + other.index,
            self.values + other.values,
            self.header + other.header,
            self.framing + other.framing,
        )


def largest_value_bytes(coding: ValueCoding, kept: int) -> int:
    """Return the length of the value part of ``kept`` values: the exact one, or, for ``calibrated``, a bound."""
    match coding:
        case "f32":
            return 4 * kept
        case "f16":
            return 2 * kept
        case "int8":
            return _INT8_SCALE.size + kept
        case "calibrated":
            return largest_bytes(kept)


def largest_index_bytes(coding: IndexCoding, size: int, kept: int) -> int:
    """Return the length of the index part of ``kept`` of ``size`` coordinates: the exact one, or a bound."""
    match coding:
        case "seed":
            return 0
        case "raw":
            return 4 * kept
        case "compact":
            return 1 + -(-size // 8)


def encode(
    update: SparseUpdate, coding: ValueCoding, index_coding: IndexCoding = "seed", grid_step: float = 0.0
) -> bytes:
    """Return ``update`` as bytes; its indices, if it has any, travel under ``index_coding``.

    ``grid_step`` is that of ``calibrated`` and of no other coding.
    """
    index_part = _encode_indices(update, index_coding)
    value_part = _encode_values(update.values, coding, grid_step)
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        _INDEX_CODES[index_coding],
        _VALUE_CODES[coding],
        0,
        update.round,
        update.model_version,
        update.mask_digest,
        update.size,
        update.values.size,
        len(index_part),
        len(value_part),
    )
    checksum = zlib.crc32(value_part, zlib.crc32(index_part, zlib.crc32(header, _grid_sum(coding, grid_step))))
    return b"".join((header, _CHECKSUM.pack(checksum), index_part, value_part))


def parts_of(data: bytes) -> PartBytes:
    """Return what the parts of an encoded update cost; ``data`` must have been decoded or just encoded."""
    *_, index_length, value_length = _HEADER.unpack_from(data)
    return PartBytes(index=index_length, values=value_length, header=HEADER_BYTES)


def decode(
    data: bytes,
    *,
    size: int,
    max_kept: int,
    value_coding: ValueCoding,
    index_coding: IndexCoding = "seed",
    grid_step: float = 0.0,
) -> SparseUpdate:
    """Parse an update of a model of ``size`` parameters: at most ``max_kept`` values, coded as asked for.

    Guarantees: the result has finite or non-finite values exactly as sent, indices (if any) sorted, unique and below
    ``size``; any other input is a WireError, found before memory is allocated for it.
    """
    if len(data) < HEADER_BYTES:
        raise WireError(f"expected an update of at least {HEADER_BYTES} bytes, got {len(data)}")
    (
        magic,
        version,
        index_code,
        value_code,
        reserved,
        round_number,
        model_version,
        mask_digest,
        update_size,
        kept,
        index_length,
        value_length,
    ) = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise WireError(f"expected an update to start with {_MAGIC!r}, got {magic!r}")
    if version != _VERSION or reserved != 0:
        raise WireError(f"expected update version {_VERSION}, got {version}; update the older of the two sides")
    if index_code not in _INDEX_NAMES or value_code not in _VALUE_NAMES:
        raise WireError(f"unknown coding: index {index_code}, values {value_code}")
    if (coding := _VALUE_NAMES[value_code]) != value_coding:
        raise WireError(f"expected values coded as {value_coding}, got {coding}")
    if (found := _INDEX_NAMES[index_code]) != index_coding:
        raise WireError(f"expected indices coded as {index_coding}, got {found}")
    if update_size != size:
        raise WireError(f"expected an update of a model of {size} parameters, got {update_size}")
    if kept > max_kept:
        raise WireError(f"expected at most {max_kept} values, got {kept}")
    value_limit, index_limit = largest_value_bytes(coding, kept), largest_index_bytes(index_coding, size, kept)
    if (
        value_length > value_limit
        or index_length > index_limit
        or (value_length < value_limit and coding != "calibrated")
        or (index_length < index_limit and index_coding != "compact")
    ):
        raise WireError(f"lengths disagree: {kept} values, {index_length} index bytes, {value_length} value bytes")
    if len(data) != HEADER_BYTES + index_length + value_length:
        raise WireError(f"expected {HEADER_BYTES + index_length + value_length} bytes in all, got {len(data)}")
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    body = memoryview(data)[HEADER_BYTES:]
    if zlib.crc32(body, zlib.crc32(data[: _HEADER.size], _grid_sum(coding, grid_step))) != checksum:
        grid = " or is on another grid (has the site's declared size changed?)" if coding == "calibrated" else ""
        raise WireError(f"the checksum does not match: the update was damaged on its way{grid}")
    indices = _decode_indices(body[:index_length], index_coding, size, kept)
    values = _decode_values(body[index_length:], coding, kept, grid_step)
    return SparseUpdate(round_number, model_version, mask_digest, size, values, indices)


def _grid_sum(coding: ValueCoding, grid_step: float) -> int:
    """Return where the checksum starts: the grid is not sent, but both sides must mean the same one."""
    return zlib.crc32(_GRID_STEP.pack(grid_step)) if coding == "calibrated" else 0


def clipped(values: Values, clip_norm: float) -> Values:
    """Return values * min(1, clip_norm / ||values||); zeros where a value is not finite: that update says nothing."""
    norm = float(np.linalg.norm(values.astype(np.float64)))
    if not np.isfinite(norm):
        return np.zeros_like(values)
    return values if norm <= clip_norm else (values * np.float64(clip_norm / norm)).astype(np.float32)


def to_grid(values: NDArray[np.floating[Any]], grid_step: float) -> Integers:
    """Return the nearest multiples of ``grid_step``, as integers; what is not finite becomes the smallest int32."""
    with np.errstate(invalid="ignore", over="ignore"):
        steps = np.rint(np.asarray(values, np.float64) / grid_step)
    steps = np.where(np.isfinite(values), np.clip(steps, _NOT_FINITE + 1, -(_NOT_FINITE + 1)), _NOT_FINITE)
    return steps.astype(np.int32)


def rounded_at_random(values: Values, grid_step: float, uniforms: NDArray[np.float64]) -> Values:
    """Return each value rounded to one of the two multiples of ``grid_step`` around it, the nearer one more often.

    Computes: grid_step * floor(value / grid_step + u), with ``uniforms`` u independent on (0, 1).
    Guarantees: the mean over u is the value itself, whatever it is; the variance is at most grid_step^2 / 4.
    Edge cases: what is not finite stays so.
    """
    with np.errstate(invalid="ignore"):
        steps = np.floor(np.asarray(values, np.float64) / grid_step + uniforms)
    rounded: Values = (steps * grid_step).astype(np.float32)
    return rounded


def from_grid(steps: Integers, grid_step: float) -> Values:
    """Return the values that integers on the grid stand for: one IEEE product each, the same on every machine."""
    values: Values = (steps * np.float64(grid_step)).astype(np.float32)
    values[steps == _NOT_FINITE] = np.nan
    return values


def _encode_values(values: Values, coding: ValueCoding, grid_step: float) -> bytes:
    match coding:
        case "f32":
            return np.ascontiguousarray(values, "<f4").tobytes()
        case "f16":
            # Beyond the range of f16 the largest finite value stands in: an infinity would be rejected.
            limit = np.float32(np.finfo(np.float16).max)
            return np.clip(values, -limit, limit).astype("<f2").tobytes()
        case "int8":
            scale = np.float32(float(np.max(np.abs(values), initial=0.0)) / 127)
            # A subnormal scale has too few bits to stay within half a step, or within a byte: all zeros instead.
            if scale < np.finfo(np.float32).tiny:
                scale, steps = np.float32(0), np.zeros(values.size, np.int8)
            else:
                steps = np.rint(values / scale).astype(np.int8)
            return _INT8_SCALE.pack(scale) + steps.tobytes()
        case "calibrated":
            return encode_integers(to_grid(values, grid_step))


def _decode_values(part: memoryview, coding: ValueCoding, kept: int, grid_step: float) -> Values:
    match coding:
        case "f32":
            return np.frombuffer(part, "<f4", kept).astype(np.float32, copy=False)
        case "f16":
            return np.frombuffer(part, "<f2", kept).astype(np.float32)
        case "int8":
            (scale,) = _INT8_SCALE.unpack_from(part)
            steps = np.frombuffer(part, np.int8, kept, offset=_INT8_SCALE.size)
            return steps.astype(np.float32) * np.float32(scale)
        case "calibrated":
            return from_grid(decode_integers(part, kept), grid_step)


def _encode_indices(update: SparseUpdate, coding: IndexCoding) -> bytes:
    if (update.indices is None) != (coding == "seed"):
        raise ValueError(f"expected indices exactly where they travel, got {coding} and indices={update.indices}")
    if update.indices is None:
        return b""
    if coding == "compact":
        return encode_indices(update.indices, update.size)
    return update.indices.astype("<u4").tobytes()


def _decode_indices(part: memoryview, coding: IndexCoding, size: int, kept: int) -> Indices | None:
    if coding == "seed":
        return None
    if coding == "compact":
        return decode_indices(part, size, kept)
    indices = np.frombuffer(part, "<u4").astype(np.int64)
    if indices.size and (indices[-1] >= size or np.any(np.diff(indices) <= 0)):
        raise WireError(f"expected sorted, unique indices below {size}")
    return indices
