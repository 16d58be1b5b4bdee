import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common import coding
from common.coding import HEADER_BYTES, PartBytes, SparseUpdate, ValueCoding, decode, encode, parts_of, value_bytes
from common.errors import WireError

VALUES = np.array([1.5, -2.25, 0.0], np.float32)
FINITE = hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-1e4, 1e4, width=32))


def update_of(values: np.ndarray, indices: np.ndarray | None = None, size: int = 10) -> SparseUpdate:
    return SparseUpdate(3, 2, 0xDEADBEEF, size, values, indices)


def reread(data: bytes, value_coding: ValueCoding = "f32", size: int = 10, max_kept: int = 10) -> SparseUpdate:
    return decode(data, size=size, max_kept=max_kept, value_coding=value_coding)


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


def test_golden_bytes_with_indices() -> None:
    golden = (
        "46535655010100000300000002000000efbeadde0a000000030000000c0000000c000000b852a9ae"
        "0000000004000000090000000000c03f000010c000000000"
    )
    assert encode(update_of(VALUES, np.array([0, 4, 9])), "f32").hex() == golden
    indices = reread(bytes.fromhex(golden)).indices
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
    for indices in (None, np.array([0, 4, 9])):
        for value_coding in ("f32", "f16", "int8"):
            data = encode(update_of(VALUES, indices), value_coding)
            parts = parts_of(data)
            assert parts.total == len(data)
            assert parts.values == value_bytes(value_coding, 3)
            assert parts.index == (0 if indices is None else 12)


def test_part_bytes_add() -> None:
    assert PartBytes(1, 2, 3, 4) + PartBytes(10, 20, 30, 40) == PartBytes(11, 22, 33, 44)
    assert PartBytes(1, 2, 3, 4).total == 10


@given(st.binary(max_size=200))
def test_random_bytes_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        reread(data)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_every_flipped_bit_is_noticed(position: int, bit: int) -> None:
    data = bytearray(encode(update_of(VALUES, np.array([0, 4, 9])), "f32"))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(WireError):
        reread(bytes(data))


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


@pytest.mark.parametrize("indices", [[4, 0, 9], [0, 0, 9], [0, 4, 10]])
def test_indices_must_be_sorted_unique_and_in_range(indices: list[int]) -> None:
    with pytest.raises(WireError, match="sorted, unique indices below 10"):
        reread(encode(update_of(VALUES, np.array(indices)), "f32"))


def test_model_round_trip_and_damage() -> None:
    model = np.linspace(-1, 1, 100, dtype=np.float32)
    data = coding.encode_model(model)
    assert (coding.decode_model(data, 100) == model).all()
    with pytest.raises(WireError, match="404 bytes, got 400"):
        coding.decode_model(data[:-4], 100)
    with pytest.raises(WireError, match="checksum"):
        coding.decode_model(data[:-1] + bytes([data[-1] ^ 1]), 100)


def test_header_is_small() -> None:
    assert HEADER_BYTES == 40
