"""The model on its way to the sites: in full, or as the difference from one that a site holds.

On a grid (``step`` > 0) every parameter is an integer multiple of the step, so a model is a vector of small integers:
server and sites that apply the same integers hold the same bits, whatever way they came there. Without a grid the model
travels in full, as float32 or float16.

Layout: a fixed little-endian header, then the masks, then the body.

====================  ======  =========================================================================
field                 bytes   meaning
====================  ======  =========================================================================
magic                 4       ``FSVM``
version               1       1
form                  1       0 ``f32``, 1 ``f16``, 2 ``grid`` (all integers), 3 ``delta`` (differences of integers
                              on the masks' union), 4 ``held`` (nothing: the site holds it), 5 ``chosen`` (as
                              ``delta``, on the chosen mask whose digest stands where the masks stand),
                              6 ``scattered`` (as ``delta``, on coordinates that come along)
masks                 2       how many masks follow; none in a ``delta`` means all coordinates
base                  8       digest of the model that a difference starts from
checksum              4       CRC-32 of everything else
masks                 8 each  epoch and kept (uint32); seed and size are the plan's
body                          little-endian floats, or ``common.integers``; before those of ``scattered`` their number
                              and the length of their indices (uint32 each), then the indices (``common.indices``)
====================  ======  =========================================================================

Before it may stand blocks of things that a method needs besides, each sent to a site once: ``FSVK``, a mask that the
server has chosen, in the compact index coding; ``FSVR``, a reference model, itself in one of the forms above. A block
is its magic, the length of its content (uint32), a CRC-32 of both, and the content; the plan names what it must hold.
"""

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from common.coding import PartBytes, Values, from_grid, to_grid
from common.errors import ConfigError, ModelMissing, WireError
from common.indices import decode_indices, encode_indices
from common.integers import Integers, decode_integers, encode_integers
from common.mask import Indices, MaskSpec, held_mask, hold
from common.plan import RoundPlan

_MAGIC = b"FSVM"
_VERSION = 1
_HEADER = struct.Struct("<4sBBH8s")
_CHECKSUM = struct.Struct("<I")
_MASK = struct.Struct("<II")
_HEAD_BYTES = _HEADER.size + _CHECKSUM.size
_FORMS = ("f32", "f16", "grid", "delta", "held", "chosen", "scattered")
_SCATTERED = struct.Struct("<II")
_MASK_BLOCK, _REFERENCE_BLOCK = b"FSVK", b"FSVR"
_BLOCK = struct.Struct("<4sI")
_BLOCK_BYTES = _BLOCK.size + _CHECKSUM.size
_DIGEST_BYTES = 8
_NO_BASE = bytes(8)
MOST_MASKS = 64  # drawing one takes time: a message must not make a site draw without end
MOST_STEPS = 2**22  # integers beyond it could not be read back from a float32


def digest_of(model: Values) -> str:
    """Return the name of a model: 64 bits of the SHA-256 of its little-endian float32, as 16 hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(model, "<f4").data).hexdigest()[:16]


def union_of(masks: Sequence[MaskSpec], size: int) -> Indices | None:
    """Return the coordinates that any of ``masks`` keeps, sorted; None where that is all of ``size``."""
    if not masks or any(mask.kept == size for mask in masks):
        return None
    if len(masks) == 1:
        return masks[0].indices()
    kept = np.zeros(size, np.bool_)
    for mask in masks:
        kept[mask.indices()] = True
    return np.flatnonzero(kept)


def encode_floats(model: Values, coding: Literal["f32", "f16"]) -> bytes:
    """Return a whole model as floats; for ``f16`` its values must be float16 numbers already."""
    return _framed(_FORMS.index(coding), _NO_BASE, (), model.astype("<f4" if coding == "f32" else "<f2").tobytes())


def encode_grid(numbers: Integers) -> bytes:
    """Return a whole model on the grid."""
    return _framed(_FORMS.index("grid"), _NO_BASE, (), encode_integers(numbers))


def encode_delta(base: str, masks: Sequence[MaskSpec], difference: Integers) -> bytes:
    """Return ``difference`` from the model named ``base``, on the union of ``masks`` (none: on all coordinates)."""
    return _framed(_FORMS.index("delta"), bytes.fromhex(base), masks, encode_integers(difference))


def encode_chosen_delta(base: str, mask: MaskSpec, difference: Integers) -> bytes:
    """Return ``difference`` from the model named ``base`` on a chosen mask that the site holds."""
    body = bytes.fromhex(mask.chosen) + encode_integers(difference)
    return _framed(_FORMS.index("chosen"), bytes.fromhex(base), (), body)


def encode_scattered_delta(base: str, difference: Integers) -> bytes:
    """Return ``difference`` from the model named ``base``, on all coordinates, as the ones that are not zero."""
    moved = np.flatnonzero(difference)
    indices = encode_indices(moved, difference.size)
    body = b"".join((_SCATTERED.pack(moved.size, len(indices)), indices, encode_integers(difference[moved])))
    return _framed(_FORMS.index("scattered"), bytes.fromhex(base), (), body)


def encode_mask(mask: MaskSpec) -> bytes:
    """Return a chosen mask as a block that goes before a model."""
    return _block(_MASK_BLOCK, encode_indices(mask.indices(), mask.size))


def encode_reference(model: bytes) -> bytes:
    """Return an encoded reference model as a block that goes before another model."""
    return _block(_REFERENCE_BLOCK, model)


def encode_held(base: str) -> bytes:
    """Return the word that a site holds the model already."""
    return _framed(_FORMS.index("held"), bytes.fromhex(base), (), b"")


def parts_of(data: bytes) -> PartBytes:
    """Return what the parts of an encoded model cost, with the blocks before it."""
    mask, reference, model = _split(data)
    _, _, form, masks, _ = _HEADER.unpack_from(model)
    match _FORMS[form]:
        case "chosen":
            index = _DIGEST_BYTES
        case "scattered":
            index = _SCATTERED.size + _SCATTERED.unpack_from(model, _HEAD_BYTES)[1]
        case _:
            index = _MASK.size * masks
    parts = PartBytes(index=index, values=len(model) - _HEAD_BYTES - index, header=_HEAD_BYTES)
    if mask is not None:
        parts += PartBytes(index=len(mask), header=_BLOCK_BYTES)
    if reference is not None:
        parts += PartBytes(values=len(reference), header=_BLOCK_BYTES)
    return parts


def unpack(data: bytes, plan: RoundPlan, held: Callable[[str], Values | None]) -> tuple[bytes, Values | None]:
    """Take the blocks off an encoded model: hold the mask, return the rest and the reference model where one came.

    Guarantees: the mask and the reference are the ones that ``plan`` names. Raises ModelMissing where the plan names
    one that neither came nor is held here (``held`` returns a model by its digest), WireError for other bytes.
    """
    mask, reference, model = _split(data)
    if mask is not None:
        if not plan.mask_chosen:
            raise WireError("a mask came with a plan that names none")
        if hold(decode_indices(mask, plan.mask_size, plan.mask_kept)) != plan.mask_chosen:
            raise WireError(f"expected the mask {plan.mask_chosen}, got another one")
    if not plan.mask.is_one_draw:
        try:
            _ = plan.mask.indices()  # raises ModelMissing where it is not held
        except ConfigError as error:
            raise WireError(f"a plan came with an impossible mask: {error}") from error
    if reference is None:
        needed = plan.reference_digest not in ("", plan.model_digest)
        if needed and held(plan.reference_digest) is None:
            raise ModelMissing(f"the reference model {plan.reference_digest} is not held here")
        return model, None
    if not plan.reference_digest:
        raise WireError("a reference model came with a plan that names none")
    return model, decode(reference, replace(plan, model_digest=plan.reference_digest), held)


def _split(data: bytes) -> tuple[bytes | None, bytes | None, bytes]:
    """Return the mask's block, the reference's block and the model."""
    blocks: dict[bytes, bytes] = {}
    while data[:4] in (_MASK_BLOCK, _REFERENCE_BLOCK) and data[:4] not in blocks:
        if len(data) < _BLOCK_BYTES:
            raise WireError(f"expected a block of at least {_BLOCK_BYTES} bytes, got {len(data)}")
        magic, length = _BLOCK.unpack_from(data)
        (checksum,) = _CHECKSUM.unpack_from(data, _BLOCK.size)
        content = data[_BLOCK_BYTES : _BLOCK_BYTES + length]
        if len(content) != length or zlib.crc32(content, zlib.crc32(data[: _BLOCK.size])) != checksum:
            raise WireError(f"the checksum of {magic.decode()} does not match: it was damaged on its way")
        blocks[magic], data = content, data[_BLOCK_BYTES + length :]
    return blocks.get(_MASK_BLOCK), blocks.get(_REFERENCE_BLOCK), data


def _block(magic: bytes, content: bytes) -> bytes:
    head = _BLOCK.pack(magic, len(content))
    return b"".join((head, _CHECKSUM.pack(zlib.crc32(content, zlib.crc32(head))), content))


def decode(data: bytes, plan: RoundPlan, held: Callable[[str], Values | None]) -> Values:
    """Return the model that ``plan`` starts from; ``held`` returns a model that this side holds, by its digest.

    Guarantees: the result has ``plan.model_digest``. Raises ModelMissing where the base is not held, or where what was
    held turns out to be another model than the server thinks; WireError for bytes that are not a model.
    """
    form, base, masks, body = _unframed(data, plan)
    size = plan.mask.size
    if form == "f32" or form == "f16":
        width = 4 if form == "f32" else 2
        if len(body) != width * size:
            raise WireError(f"expected a model of {size} parameters in {width * size} bytes, got {len(body)} bytes")
        model = np.frombuffer(body, "<f4" if form == "f32" else "<f2").astype(np.float32)
    elif form == "grid":
        model = from_grid(decode_integers(body, size), _step(plan))
    else:
        start = held(base)
        if start is None:
            raise ModelMissing(f"the model {base} is not held here")
        match form:
            case "held":
                model = start
            case "chosen":
                model = _moved_on(start, _chosen_of(body), body[_DIGEST_BYTES:], plan)
            case "scattered":
                model = _moved_on(start, *_scattered_of(body, size), plan)
            case _:
                model = _moved_on(start, union_of(masks, size), body, plan)
    if digest_of(model) != plan.model_digest:
        if form in ("delta", "held", "chosen", "scattered"):
            raise ModelMissing(f"the difference from {base} does not lead to the model {plan.model_digest}")
        raise WireError(f"expected the model {plan.model_digest}, got {digest_of(model)}")
    model.setflags(write=False)
    return model


def _chosen_of(body: memoryview) -> Indices:
    digest = bytes(body[:_DIGEST_BYTES]).hex()
    indices = held_mask(digest)
    if indices is None:
        raise ModelMissing(f"the mask {digest} is not held here")
    return indices


def _scattered_of(body: memoryview, size: int) -> tuple[Indices, memoryview]:
    """Return the coordinates that came along, and the integers on them."""
    if len(body) < _SCATTERED.size:
        raise WireError(f"expected a scattered difference of at least {_SCATTERED.size} bytes, got {len(body)}")
    count, length = _SCATTERED.unpack_from(body)
    if count > size or length > len(body) - _SCATTERED.size:
        raise WireError(f"lengths disagree: {count} of {size} coordinates in {length} of {len(body)} bytes")
    values = _SCATTERED.size + length
    return decode_indices(body[_SCATTERED.size : values], size, count), body[values:]


def _moved_on(start: Values, union: Indices | None, body: memoryview, plan: RoundPlan) -> Values:
    size, step = plan.mask.size, _step(plan)
    if start.shape != (size,):
        raise WireError(f"expected a model of {size} parameters to start from, got {start.size}")
    if union is not None and union.size and union[-1] >= size:
        raise WireError(f"expected a mask of {size} coordinates, got one that keeps {union[-1]}")
    difference = decode_integers(body, size if union is None else union.size)
    numbers = to_grid(start, step)
    if union is None:
        numbers += difference
    else:
        numbers[union] += difference
    return from_grid(numbers, step)


def _step(plan: RoundPlan) -> float:
    if not plan.model_step:
        raise WireError("expected a model as floats: the plan has no grid for it")
    return plan.model_step


def _framed(form: int, base: bytes, masks: Sequence[MaskSpec], body: bytes) -> bytes:
    header = _HEADER.pack(_MAGIC, _VERSION, form, len(masks), base)
    rest = b"".join((*(_MASK.pack(mask.epoch, mask.kept) for mask in masks), body))
    return b"".join((header, _CHECKSUM.pack(zlib.crc32(rest, zlib.crc32(header))), rest))


def _unframed(data: bytes, plan: RoundPlan) -> tuple[str, str, list[MaskSpec], memoryview]:
    if len(data) < _HEAD_BYTES:
        raise WireError(f"expected a model of at least {_HEAD_BYTES} bytes, got {len(data)}")
    magic, version, form, count, base = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or form >= len(_FORMS):
        raise WireError(f"expected a model of version {_VERSION}, got {data[:6]!r}; update the older of the two sides")
    rest = memoryview(data)[_HEAD_BYTES:]
    if _CHECKSUM.unpack_from(data, _HEADER.size)[0] != zlib.crc32(rest, zlib.crc32(data[: _HEADER.size])):
        raise WireError("the checksum does not match: the model was damaged on its way")
    if count > MOST_MASKS or len(rest) < _MASK.size * count:
        raise WireError(f"expected at most {MOST_MASKS} masks of {_MASK.size} bytes, got {count} in {len(rest)} bytes")
    body = rest[_MASK.size * count :]
    try:
        masks = [
            MaskSpec(plan.mask_seed, epoch, plan.mask_size, kept)
            for epoch, kept in _MASK.iter_unpack(rest[: _MASK.size * count])
        ]
    except ConfigError as error:
        raise WireError(f"a model came with an impossible mask: {error}") from error
    return _FORMS[form], base.hex(), masks, body
