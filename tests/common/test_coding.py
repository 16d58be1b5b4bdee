import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common import coding
from common.coding import (
    HEADER_BYTES,
    IndexCoding,
    PartBytes,
    SparseUpdate,
    ValueCoding,
    decode,
    encode,
    largest_index_bytes,
    largest_value_bytes,
    parts_of,
)
from common.errors import WireError

STEP = 0.25
VALUES = np.array([1.5, -2.25, 0.0], np.float32)
FINITE = hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-1e4, 1e4, width=32))


def update_of(values: np.ndarray, indices: np.ndarray | None = None, size: int = 10) -> SparseUpdate:
    return SparseUpdate(3, 2, 0xDEADBEEF, size, values, indices)


def reread(
    data: bytes,
    value_coding: ValueCoding = "f32",
    size: int = 10,
    max_kept: int = 10,
    index_coding: IndexCoding = "seed",
) -> SparseUpdate:
    return decode(
        data, size=size, max_kept=max_kept, value_coding=value_coding, index_coding=index_coding, grid_step=STEP
    )


@pytest.mark.parametrize(
    ("value_coding", "golden"),
    [
        (
            "f32",
            "46535655010000000300000002000000efbeadde0a00000003000000000000000c000000f26b19cd0000c03f000010c000000000",
        ),
        ("f16", "46535655010001000300000002000000efbeadde0a0000000300000000000000060000002565b2a5003e80c00000"),
        ("int8", "46535655010002000300000002000000efbeadde0a0000000300000000000000070000004da3b4b94522913c558100"),
    ],
)
def test_golden_bytes(value_coding: ValueCoding, golden: str) -> None:
    assert encode(update_of(VALUES), value_coding).hex() == golden
    assert reread(bytes.fromhex(golden), value_coding).values == pytest.approx(VALUES, abs=2.25 / 127 / 2)


@pytest.mark.parametrize(
    ("index_coding", "golden"),
    [
        (
            "seed",
            "46535655010003000300000002000000efbeadde0a00000003000000000000000e0000002bd6eac3e6b5503c09000000000068a46ddb",
        ),
        (
            "compact",
            "46535655010203000300000002000000efbeadde0a00000003000000020000000e000000d6ebd28e5502e6b5503c09000000000068a46ddb",
        ),
    ],
)
def test_golden_bytes_of_calibrated_values(index_coding: IndexCoding, golden: str) -> None:
    indices = None if index_coding == "seed" else np.array([0, 4, 9])
    assert encode(update_of(VALUES, indices), "calibrated", index_coding, STEP).hex() == golden
    assert reread(bytes.fromhex(golden), "calibrated", index_coding=index_coding).values.tolist() == VALUES.tolist()


def test_golden_bytes_with_indices() -> None:
    golden = (
        "46535655010100000300000002000000efbeadde0a000000030000000c0000000c000000b852a9ae"
        "0000000004000000090000000000c03f000010c000000000"
    )
    assert encode(update_of(VALUES, np.array([0, 4, 9])), "f32", "raw").hex() == golden
    indices = reread(bytes.fromhex(golden), index_coding="raw").indices
    assert indices is not None and indices.tolist() == [0, 4, 9]


@given(FINITE)
def test_f32_is_exact(values: np.ndarray) -> None:
    again = reread(encode(update_of(values, size=99), "f32"), size=99, max_kept=50)
    assert (again.values == values).all()
    assert (again.round, again.model_version, again.mask_digest, again.size) == (3, 2, 0xDEADBEEF, 99)


@given(FINITE)
def test_f16_rounds_to_f16(values: np.ndarray) -> None:
    again = reread(encode(update_of(values), "f16"), "f16", max_kept=50)
    assert (again.values == values.astype(np.float16).astype(np.float32)).all()


@example(np.array([1e-45], np.float32))
@example(np.array([190 * 1.4e-45], np.float32))
@given(FINITE)
def test_int8_is_within_half_a_step(values: np.ndarray) -> None:
    again = reread(encode(update_of(values), "int8"), "int8", max_kept=50)
    largest = float(np.abs(values).max())
    # Below the smallest normal step every value is sent as zero.
    bound = largest / 127 * 0.501 if largest / 127 >= np.finfo(np.float32).tiny else largest
    assert np.abs(again.values - values).max() <= bound


def test_f16_does_not_turn_large_values_into_infinities() -> None:
    again = reread(encode(update_of(np.array([1e30, -1e30], np.float32)), "f16"), "f16")
    assert again.values.tolist() == [65504, -65504]


def test_parts_add_up_to_what_is_sent() -> None:
    for index_coding, index_bytes in (("seed", 0), ("raw", 12), ("compact", 2)):
        indices = None if index_coding == "seed" else np.array([0, 4, 9])
        for value_coding in ("f32", "f16", "int8", "calibrated"):
            data = encode(update_of(VALUES, indices), value_coding, index_coding, STEP)
            parts = parts_of(data)
            assert parts.total == len(data)
            limit = largest_value_bytes(value_coding, 3)
            assert parts.values <= limit if value_coding == "calibrated" else parts.values == limit
            assert parts.index == index_bytes <= max(12, largest_index_bytes(index_coding, 10, 3))


def test_part_bytes_add() -> None:
    assert PartBytes(1, 2, 3, 4) + PartBytes(10, 20, 30, 40) == PartBytes(11, 22, 33, 44)
    assert PartBytes(1, 2, 3, 4).total == 10


@given(st.binary(max_size=200))
def test_random_bytes_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        reread(data)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_every_flipped_bit_is_noticed(position: int, bit: int) -> None:
    for value_coding, index_coding in (("f32", "raw"), ("calibrated", "compact")):
        data = bytearray(encode(update_of(VALUES, np.array([0, 4, 9])), value_coding, index_coding, STEP))
        data[position % len(data)] ^= 1 << bit
        with pytest.raises(WireError):
            reread(bytes(data), value_coding, index_coding=index_coding)


@given(st.integers(0, 51))
def test_truncation_is_noticed(length: int) -> None:
    with pytest.raises(WireError):
        reread(encode(update_of(VALUES), "f32")[:length])


@settings(max_examples=300)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=7, max_size=7), st.binary(max_size=40))
def test_lengths_that_lie_are_noticed_before_anything_is_allocated(fields: list[int], body: bytes) -> None:
    header = coding._HEADER.pack(b"FSVU", 1, 0, 0, 0, *fields)
    with pytest.raises(WireError):
        reread(header + b"\0\0\0\0" + body)


def test_what_is_wrong_is_said() -> None:
    data = encode(update_of(VALUES), "f32")
    for arguments, message in [
        ({"size": 11}, "11 parameters, got 10"),
        ({"max_kept": 2}, "at most 2 values, got 3"),
        ({"value_coding": "f16"}, "coded as f16, got f32"),
    ]:
        with pytest.raises(WireError, match=message):
            reread(data, **arguments)


def reframed(data: bytes, place: int, value: int, added: bytes = b"") -> bytes:
    """Return an update with another byte in its header, perhaps longer, and the checksum that goes with it."""
    body = data[HEADER_BYTES:] + added
    header = bytearray(data[: coding._HEADER.size])
    header[place] = value
    return bytes(header) + coding._CHECKSUM.pack(zlib.crc32(body, zlib.crc32(header))) + body


SEED, RAW = encode(update_of(VALUES), "f32"), encode(update_of(VALUES, np.array([0, 4, 9])), "f32", "raw")
KEPT_AT, INDEX_BYTES_AT, VALUE_BYTES_AT = 24, 28, 32


@pytest.mark.parametrize(
    ("data", "index_coding", "message"),
    [
        (SEED[: HEADER_BYTES - 1], "seed", "at least 40 bytes, got 39"),
        (SEED[:HEADER_BYTES], "seed", "expected 52 bytes in all, got 40"),
        (reframed(SEED, 0, ord("X")), "seed", "expected an update to start with b'FSVU'"),
        (reframed(SEED, 5, 3), "seed", "unknown coding: index 3, values 0"),
        (reframed(SEED, 6, 4), "seed", "unknown coding: index 0, values 4"),
        (reframed(SEED, 7, 1), "seed", "expected update version 1"),
        (reframed(SEED, KEPT_AT, 2), "seed", "lengths disagree: 2 values, 0 index bytes, 12 value bytes"),
        (reframed(SEED, KEPT_AT, 4), "seed", "lengths disagree: 4 values, 0 index bytes, 12 value bytes"),
        (reframed(SEED, INDEX_BYTES_AT, 1), "seed", "lengths disagree: 3 values, 1 index bytes"),
        (reframed(RAW, INDEX_BYTES_AT, 11), "raw", "lengths disagree: 3 values, 11 index bytes"),
        (reframed(RAW, INDEX_BYTES_AT, 13), "raw", "lengths disagree: 3 values, 13 index bytes"),
        (reframed(SEED, VALUE_BYTES_AT, 12, b"\0"), "seed", "expected 52 bytes in all, got 53"),
    ],
)
def test_one_byte_of_the_header_that_is_wrong(data: bytes, index_coding: IndexCoding, message: str) -> None:
    with pytest.raises(WireError, match=message):
        reread(data, index_coding=index_coding)


def test_as_many_values_as_the_plan_allows() -> None:
    assert reread(SEED, max_kept=3).values.tolist() == VALUES.tolist()


@pytest.mark.parametrize("indices", [[4, 0, 9], [0, 0, 9], [0, 4, 10]])
def test_indices_must_be_sorted_unique_and_in_range(indices: list[int]) -> None:
    with pytest.raises(WireError, match="sorted, unique indices below 10"):
        reread(encode(update_of(VALUES, np.array(indices)), "f32", "raw"), index_coding="raw")


def test_header_is_small() -> None:
    assert HEADER_BYTES == 40


def test_indices_travel_exactly_where_there_are_any() -> None:
    for indices, index_coding in ((None, "raw"), (np.array([0, 4, 9]), "seed")):
        with pytest.raises(ValueError, match="exactly where they travel"):
            encode(update_of(VALUES, indices), "f32", index_coding)
    with pytest.raises(WireError, match="indices coded as compact, got raw"):
        reread(encode(update_of(VALUES, np.array([0, 4, 9])), "f32", "raw"), index_coding="compact")


@given(FINITE)
def test_calibrated_is_within_half_a_step(values: np.ndarray) -> None:
    again = reread(encode(update_of(values), "calibrated", grid_step=STEP), "calibrated", max_kept=50)
    # Half a step, and the rounding of the result to float32.
    assert np.abs(again.values - values).max() <= STEP / 2 + np.abs(values).max() * 2**-24


def test_another_grid_than_the_senders_is_noticed() -> None:
    data = encode(update_of(VALUES), "calibrated", grid_step=STEP * 2)
    with pytest.raises(WireError, match="on another grid"):
        reread(data, "calibrated")


def test_calibrated_values_that_are_no_numbers_arrive_as_such() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.3], np.float32)
    again = reread(encode(update_of(values), "calibrated", grid_step=STEP), "calibrated").values
    assert np.isnan(again[:3]).all()
    assert again[3] == -again[4] == np.float32((2**31 - 1) * STEP)
    assert again[5] == 0.25


@pytest.mark.parametrize(("grid", "bits"), [(0.5, 3.06), (1.0, 2.1)])
def test_rounding_to_the_grid_is_free_of_bias_and_adds_what_it_should(grid: float, bits: float) -> None:
    noise_std, count = 0.037, 1_000_000
    rng = np.random.default_rng(5)
    values = (rng.normal(0, noise_std, count) + 0.01 * rng.standard_t(5, count)).astype(np.float32)
    step = grid * noise_std
    data = encode(update_of(values, size=count), "calibrated", grid_step=step)
    again = decode(data, size=count, max_kept=count, value_coding="calibrated", grid_step=step).values
    errors = again.astype(np.float64) - values
    assert np.abs(errors).max() <= step / 2 * (1 + 1e-6)
    assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(count)
    assert errors.var() == pytest.approx(grid**2 / 12 * noise_std**2, rel=0.02)
    assert bits < 8 * parts_of(data).values / count < bits + 0.15
