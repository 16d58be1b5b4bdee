"""Messages whose lengths lie, with checksums that are right: an error or a result, and never more memory than declared.

What is declared is the plan's: the model's size. Everything that a decoder makes is a small multiple of it, of the
bytes that came, and of the coder's table; the numbers that lie here would make it gigabytes.
"""

import contextlib
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import broadcast, coding, integers
from common.coding import IndexCoding, ValueCoding
from common.errors import ModelMissing, WireError
from common.indices import decode_indices, encode_indices
from common.integers import decode_integers, encode_integers
from common.mask import hold
from tests.support import small_plan

SIZE, KEPT, STEP = 20_000, 4_000, 0.25
BYTES_A_COORDINATE = 80  # a few vectors of eight bytes at a time
TABLE_BYTES = 3 << 20
RNG = np.random.default_rng(5)
INDICES = np.sort(RNG.permutation(SIZE)[:KEPT])
NUMBERS = np.rint(RNG.normal(0, 2, KEPT)).astype(np.int32)
LIES = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1), st.sampled_from([KEPT, SIZE, 2**31, 2**32 - 1]))
CODINGS = list(product(("f32", "f16", "int8", "calibrated"), ("seed", "raw", "compact")))


@contextlib.contextmanager
def within(declared: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        with contextlib.suppress(WireError, ModelMissing):
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= BYTES_A_COORDINATE * declared + TABLE_BYTES, f"{peak} bytes for {declared} coordinates"


def lying(good: bytes, place: int, lie: int) -> bytes:
    """Return ``good`` with another little-endian uint32 at ``place``."""
    place %= max(1, len(good) - 3)
    return good[:place] + lie.to_bytes(4, "little") + good[place + 4 :]


def test_a_decoder_that_believes_a_length_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"bytes for 20000 coordinates"), within(SIZE):
        np.zeros(2**23)


@pytest.mark.parametrize(("value_coding", "index_coding"), CODINGS)
@settings(max_examples=40)
@given(st.integers(0, 39) | st.integers(0, 2**20), LIES)
def test_updates(value_coding: ValueCoding, index_coding: IndexCoding, place: int, lie: int) -> None:
    values = NUMBERS.astype(np.float32) * np.float32(STEP)
    update = coding.SparseUpdate(3, 2, 7, SIZE, values, None if index_coding == "seed" else INDICES)
    data = lying(coding.encode(update, value_coding, index_coding, STEP), place, lie)
    header, rest = data[: coding._HEADER.size], data[coding.HEADER_BYTES :]
    checksum = zlib.crc32(rest, zlib.crc32(header, coding._grid_sum(value_coding, STEP)))
    data = header + coding._CHECKSUM.pack(checksum) + rest
    with within(SIZE):
        found = coding.decode(
            data, size=SIZE, max_kept=SIZE, value_coding=value_coding, index_coding=index_coding, grid_step=STEP
        )
        assert found.values.size <= SIZE


@settings(max_examples=200)
@given(st.integers(0, 12) | st.integers(0, 2**20), LIES)
def test_integers_and_indices(place: int, lie: int) -> None:
    with within(KEPT):
        assert decode_integers(lying(encode_integers(NUMBERS), place, lie), KEPT).shape == (KEPT,)
    with within(SIZE):
        assert decode_indices(lying(encode_indices(INDICES, SIZE), place, lie), SIZE, KEPT).shape == (KEPT,)


def model_bodies() -> dict[str, bytes]:
    """Return a body of each form that is not plain floats."""
    numbers = np.zeros(SIZE, np.int32)
    numbers[INDICES] = NUMBERS
    head = broadcast._HEAD_BYTES
    return {
        "grid": broadcast.encode_grid(numbers)[head:],
        "delta": broadcast.encode_delta("0" * 16, (), numbers)[head:],
        "chosen": bytes.fromhex(hold(INDICES)) + encode_integers(NUMBERS),
        "scattered": broadcast.encode_scattered_delta("0" * 16, numbers)[head:],
    }


@pytest.mark.parametrize("form", ["grid", "delta", "chosen", "scattered"])
@settings(max_examples=60)
@given(st.integers(0, 30) | st.integers(0, 2**20), LIES, st.sampled_from([0, 1, 3]))
def test_models(form: str, place: int, lie: int, masks: int) -> None:
    plan = small_plan(SIZE, model_digest="1" * 16, model_step=STEP)
    header = broadcast._HEADER.pack(b"FSVM", 1, broadcast._FORMS.index(form), masks, bytes(8))
    rest = lying(model_bodies()[form], place, lie)
    data = header + broadcast._CHECKSUM.pack(zlib.crc32(rest, zlib.crc32(header))) + rest
    held = np.zeros(SIZE, np.float32)
    with within(SIZE), pytest.raises((WireError, ModelMissing)):
        broadcast.decode(data, plan, lambda digest: held)


@settings(max_examples=60)
@given(st.sampled_from([b"FSVK", b"FSVR"]), LIES, st.binary(max_size=60), st.booleans())
def test_blocks_before_a_model(magic: bytes, length: int, content: bytes, true_length: bool) -> None:
    head = broadcast._BLOCK.pack(magic, len(content) if true_length else length)
    block = head + broadcast._CHECKSUM.pack(zlib.crc32(content, zlib.crc32(head))) + content
    digests = {"model_digest": "1" * 16, "mask_chosen": "2" * 16, "reference_digest": "3" * 16}
    plan = small_plan(SIZE, method="importance", model_step=STEP, **digests)
    with within(SIZE), pytest.raises((WireError, ModelMissing)):
        broadcast.unpack(block + broadcast.encode_held("1" * 16), plan, lambda digest: None)


def test_words_that_lie_anywhere_are_aligned_for_the_coder(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    decoded: Callable[..., integers.Integers] = integers._decode_symbols

    def watched(words: np.ndarray, *arguments: object) -> integers.Integers:
        seen.append(words.flags.aligned)
        return decoded(words, *arguments)

    monkeypatch.setattr(integers, "_decode_symbols", watched)
    data = encode_integers(NUMBERS)
    for offset in range(4):
        moved = memoryview(bytes(offset) + data)[offset:]
        assert (decode_integers(moved, KEPT) == NUMBERS).all()
    assert seen == [True] * 4
