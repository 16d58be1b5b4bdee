"""A sparse update as bytes: index coding x value coding, and what each part cost.

Layout: a fixed little-endian header, then the index part, then the value part.

====================  ======  =========================================================================
field                 bytes   meaning
====================  ======  =========================================================================
magic                 4       ``FSVU``
version               1       1
index coding          1       0 ``seed`` (the mask of the plan: nothing travels), 1 ``explicit`` (uint32)
value coding          1       0 ``f32``, 1 ``f16``, 2 ``int8`` (a float32 scale, then one byte a value)
reserved              1       0
round                 4       the round that it answers
model version         4       the model that it started from
mask digest           4       ``MaskSpec.digest`` of the mask it was made under
size                  4       d
kept                  4       k, the number of values
index bytes           4       length of the index part
value bytes           4       length of the value part
checksum              4       CRC-32 of everything else
====================  ======  =========================================================================

Every length is checked against the plan before anything is allocated. Coding comes after the noise: it is
post-processing and costs no privacy.
"""

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from common.errors import WireError
from common.mask import Indices, MaskSpec

Values = NDArray[np.float32]
ValueCoding = Literal["f32", "f16", "int8"]
IndexCoding = Literal["seed", "explicit"]

_MAGIC = b"FSVU"
_VERSION = 1
_HEADER = struct.Struct("<4sBBBBIIIIIII")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size

_INDEX_CODES: dict[IndexCoding, int] = {"seed": 0, "explicit": 1}
_VALUE_CODES: dict[ValueCoding, int] = {"f32": 0, "f16": 1, "int8": 2}
_INDEX_NAMES = {code: name for name, code in _INDEX_CODES.items()}
_VALUE_NAMES = {code: name for name, code in _VALUE_CODES.items()}
_INT8_SCALE = struct.Struct("<f")


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


def value_bytes(coding: ValueCoding, kept: int) -> int:
    """Return the exact length of the value part of ``kept`` values."""
    match coding:
        case "f32":
            return 4 * kept
        case "f16":
            return 2 * kept
        case "int8":
            return _INT8_SCALE.size + kept


def encode(update: SparseUpdate, coding: ValueCoding) -> bytes:
    """Return ``update`` as bytes; its indices travel only where they are not the shared mask's."""
    index_part = np.empty(0, "<u4") if update.indices is None else update.indices.astype("<u4")
    value_part = _encode_values(update.values, coding)
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        _INDEX_CODES["seed" if update.indices is None else "explicit"],
        _VALUE_CODES[coding],
        0,
        update.round,
        update.model_version,
        update.mask_digest,
        update.size,
        update.values.size,
        index_part.nbytes,
        value_part.nbytes,
    )
    checksum = zlib.crc32(value_part.data, zlib.crc32(index_part.data, zlib.crc32(header)))
    return b"".join((header, _CHECKSUM.pack(checksum), index_part.data, value_part.data))


def parts_of(data: bytes) -> PartBytes:
    """Return what the parts of an encoded update cost; ``data`` must have been decoded or just encoded."""
    *_, index_length, value_length = _HEADER.unpack_from(data)
    return PartBytes(index=index_length, values=value_length, header=HEADER_BYTES)


def decode(data: bytes, *, size: int, max_kept: int, value_coding: ValueCoding) -> SparseUpdate:
    """Parse an update of a model of ``size`` parameters: at most ``max_kept`` values, coded as ``value_coding``.

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
    if update_size != size:
        raise WireError(f"expected an update of a model of {size} parameters, got {update_size}")
    if kept > max_kept:
        raise WireError(f"expected at most {max_kept} values, got {kept}")
    explicit = _INDEX_NAMES[index_code] == "explicit"
    if value_length != value_bytes(coding, kept) or index_length != (4 * kept if explicit else 0):
        raise WireError(f"lengths disagree: {kept} values, {index_length} index bytes, {value_length} value bytes")
    if len(data) != HEADER_BYTES + index_length + value_length:
        raise WireError(f"expected {HEADER_BYTES + index_length + value_length} bytes in all, got {len(data)}")
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    body = memoryview(data)[HEADER_BYTES:]
    if zlib.crc32(body, zlib.crc32(data[: _HEADER.size])) != checksum:
        raise WireError("the checksum does not match: the update was damaged on its way")
    indices = _decode_indices(body[:index_length], size) if explicit else None
    values = _decode_values(body[index_length:], coding, kept)
    return SparseUpdate(round_number, model_version, mask_digest, size, values, indices)


def _encode_values(values: Values, coding: ValueCoding) -> NDArray[Any]:
    match coding:
        case "f32":
            return np.ascontiguousarray(values, "<f4")
        case "f16":
            # Beyond the range of f16 the largest finite value stands in: an infinity would be rejected.
            limit = np.float32(np.finfo(np.float16).max)
            return np.clip(values, -limit, limit).astype("<f2")
        case "int8":
            scale = np.float32(float(np.max(np.abs(values), initial=0.0)) / 127)
            # A subnormal scale has too few bits to stay within half a step, or within a byte: all zeros instead.
            if scale < np.finfo(np.float32).tiny:
                scale, steps = np.float32(0), np.zeros(values.size, np.int8)
            else:
                steps = np.rint(values / scale).astype(np.int8)
            return np.frombuffer(_INT8_SCALE.pack(scale) + steps.tobytes(), np.uint8)


def _decode_values(part: memoryview, coding: ValueCoding, kept: int) -> Values:
    match coding:
        case "f32":
            return np.frombuffer(part, "<f4", kept).astype(np.float32, copy=False)
        case "f16":
            return np.frombuffer(part, "<f2", kept).astype(np.float32)
        case "int8":
            (scale,) = _INT8_SCALE.unpack_from(part)
            steps = np.frombuffer(part, np.int8, kept, offset=_INT8_SCALE.size)
            return steps.astype(np.float32) * np.float32(scale)


def _decode_indices(part: memoryview, size: int) -> Indices:
    indices = np.frombuffer(part, "<u4").astype(np.int64)
    if indices.size and (indices[-1] >= size or np.any(np.diff(indices) <= 0)):
        raise WireError(f"expected sorted, unique indices below {size}")
    return indices


def encode_model(model: Values) -> bytes:
    """Return a whole model as little-endian float32, with its CRC-32 in front."""
    body = np.ascontiguousarray(model, "<f4")
    return b"".join((_CHECKSUM.pack(zlib.crc32(body.data)), body.data))


@lru_cache(maxsize=1)
def decode_model(data: bytes, size: int) -> Values:
    """Parse a model of ``size`` parameters; the result is read-only and shares memory with ``data``.

    Remembers the last one: a process that plays many sites is given the same bytes for each of them.
    """
    expected = _CHECKSUM.size + 4 * size
    if len(data) != expected:
        raise WireError(f"expected a model of {size} parameters in {expected} bytes, got {len(data)} bytes")
    body = memoryview(data)[_CHECKSUM.size :]
    if zlib.crc32(body) != _CHECKSUM.unpack_from(data)[0]:
        raise WireError("the checksum does not match: the model was damaged on its way")
    return np.frombuffer(body, "<f4").astype(np.float32, copy=False)


def mask_of(update: SparseUpdate, mask: MaskSpec) -> Indices:
    """Return the coordinates that ``update`` speaks about, given the plan's mask."""
    return mask.indices() if update.indices is None else update.indices
