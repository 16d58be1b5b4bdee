import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import WireError
from common.indices import _best_width, _bits, decode_indices, encode_indices, index_entropy_bits
from common.mask import Indices

LARGEST = 2**32 - 1


def random_subset(size: int, kept: int, seed: int = 1) -> Indices:
    return np.sort(np.random.default_rng(seed).choice(size, kept, replace=False))


def assert_valid(indices: Indices, size: int, kept: int) -> None:
    assert indices.dtype == np.int64 and indices.size == kept
    assert (np.diff(indices, prepend=-1) > 0).all() and (indices < size).all()


@st.composite
def subsets(draw: st.DrawFn) -> tuple[Indices, int]:
    """Any subset of a small range, or a few coordinates, in clusters or not, of a large one."""
    if draw(st.booleans()):
        chosen = draw(st.lists(st.booleans(), min_size=1, max_size=200))
        return np.flatnonzero(chosen), len(chosen)
    size = draw(st.integers(1000, LARGEST))
    starts = draw(st.lists(st.integers(0, size - 1), max_size=5))
    runs = draw(st.lists(st.integers(1, 40), min_size=len(starts), max_size=len(starts)))
    every = {index for start, run in zip(starts, runs, strict=True) for index in range(start, min(start + run, size))}
    return np.array(sorted(every), np.int64), size


@pytest.mark.parametrize(
    ("indices", "size", "golden"),
    [
        ([], 10, "01"),
        ([0, 1, 2, 3, 4], 10, "3f"),  # a bitmap after the first bit, cut after its last one
        ([0, 1, 4], 10, "b1"),
        (range(10), 10, "01"),
        ([0, 1, 3, 4, 5, 6, 8, 9], 10, "a9"),  # dropped are 2 and 7: gaps 2 and 4
        ([3, 200, 455], 1000, "5393b40f"),
        (range(20), 1000, "c0ffff03"),  # close together: width 0 is shorter than the usual one, 5
        ([LARGEST - 1], LARGEST, "fdffffff02"),
    ],
)
def test_golden_bytes(indices: list[int], size: int, golden: str) -> None:
    assert encode_indices(np.array(indices, np.int64), size).hex() == golden
    assert decode_indices(bytes.fromhex(golden), size, len(indices)).tolist() == list(indices)


@pytest.mark.parametrize(
    ("indices", "gaps", "width", "head"),
    [([3, 200, 455], [3, 196, 254], 8, [1]), ([0, 2, 4, 6], [0, 1, 1, 1], 0, [0, 0, 0, 0, 0, 0])],
)
def test_the_layout_is_what_is_documented(indices: list[int], gaps: list[int], width: int, head: list[int]) -> None:
    bits = head + [gap >> plane & 1 for plane in range(width) for gap in gaps]
    for gap in gaps:
        bits += [0] * (gap >> width) + [1]
    bits += [0] * (-len(bits) % 8)
    coded = [sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)]
    assert list(encode_indices(np.array(indices), 1000)) == coded


@given(subsets())
@example((np.array([0]), 1))
@example((np.array([], np.int64), 1))
@example((np.array([0, LARGEST - 1]), LARGEST))
def test_round_trip(subset: tuple[Indices, int]) -> None:
    indices, size = subset
    data = encode_indices(indices, size)
    again = decode_indices(memoryview(data), size, indices.size)
    assert again.tolist() == indices.tolist()
    assert_valid(again, size, indices.size)


@pytest.mark.parametrize("density", [0, 0.001, 0.01, 0.1, 0.3, 0.38, 0.5, 0.7, 0.99, 1])
def test_round_trip_of_a_large_model(density: float) -> None:
    indices = random_subset(300_007, round(300_007 * density))
    assert (decode_indices(encode_indices(indices, 300_007), 300_007, indices.size) == indices).all()


@pytest.mark.parametrize(
    ("density", "bound"), [(0.001, 1.02), (0.003, 1.02), (0.01, 1.02), (0.03, 1.02), (0.1, 1.02), (0.38, 1.043)]
)
@pytest.mark.parametrize("dropped", [False, True])
def test_a_random_subset_costs_little_more_than_its_entropy(density: float, bound: float, dropped: bool) -> None:
    size = 1_000_000
    kept = round(size * (1 - density if dropped else density))
    coded = 8 * len(encode_indices(random_subset(size, kept), size))
    assert 1 < coded / index_entropy_bits(size, kept) < bound


def test_the_bits_of_a_width_are_counted() -> None:
    gaps = np.array([0, 1, 5, 12], np.uint32)
    assert [_bits(gaps, width) for width in range(5)] == [4 + 18, 8 + 8, 12 + 4, 16 + 1, 20]


@pytest.mark.parametrize("mean", [0.2, 1, 3, 10, 100, 5000])
def test_the_best_width_has_the_fewest_bits(mean: float) -> None:
    rng = np.random.default_rng(1)
    for outliers in (0, 1, 20):
        gaps = np.append(rng.geometric(1 / (1 + mean), 50) - 1, np.full(outliers, 200_000)).astype(np.uint32)
        bits = [_bits(gaps, width) for width in range(25)]
        assert bits[_best_width(gaps)] == min(bits)


@given(subsets())
def test_no_other_code_is_shorter(subset: tuple[Indices, int]) -> None:
    """But for the head: neither another width, nor a bitmap, nor Elias-Fano; uint32 by one byte at most."""
    indices, size = subset
    coded = len(encode_indices(indices, size))
    assert coded <= 1 + math.ceil(size / 8)
    if not 0 < 2 * indices.size <= size:
        return
    gaps = np.diff(indices, prepend=-1) - 1
    last = int(indices[-1])
    rice = [(width + 1) * gaps.size + int((gaps >> width).sum()) for width in range(32)]
    elias_fano = [(width + 1) * gaps.size + (last >> width) for width in range(32)]
    assert min(rice) <= min(elias_fano)
    assert math.ceil((min(rice) + 1) / 8) <= coded <= math.ceil((min(rice) + 6) / 8)
    assert coded <= 4 * indices.size + 1


def test_few_random_indices_cost_little_more_than_their_entropy() -> None:
    """26 of 26,010, where every byte is 3 %: the width and the padding must not cost more than one on average."""
    coded = [8 * len(encode_indices(random_subset(26_010, 26, seed), 26_010)) for seed in range(200)]
    assert 1 < np.mean(coded) / index_entropy_bits(26_010, 26) < 1.04


@pytest.mark.parametrize("width", range(32))
def test_every_width_is_written_and_read(width: int) -> None:
    indices = np.array([2**width - 1])
    coded = packed("0" + "".join(str(width >> bit & 1) for bit in range(5)) + "1" * width + "1")
    assert (decode_indices(coded, LARGEST, 1) == indices).all()
    assert len(encode_indices(indices, LARGEST)) <= len(coded)


@pytest.mark.parametrize(("size", "kept", "subsets"), [(1, 0, 1), (1, 1, 1), (10, 3, 120), (52, 5, 2_598_960)])
def test_entropy_is_the_logarithm_of_the_number_of_subsets(size: int, kept: int, subsets: int) -> None:
    assert index_entropy_bits(size, kept) == pytest.approx(math.log2(subsets), abs=1e-9)
    assert index_entropy_bits(size, size - kept) == pytest.approx(math.log2(subsets), abs=1e-9)


def packed(bits: str) -> bytes:
    """Return bits, as the layout lists them, with spaces between its parts, as bytes."""
    return np.packbits(np.array([bit == "1" for bit in bits if bit != " "], np.bool_), bitorder="little").tobytes()


@pytest.mark.parametrize(
    ("bits", "size", "kept", "message"),
    [
        ("", 10, 3, "expected 3 indices below 10, got no bytes"),
        ("0 00000 11001", 10, 11, "kept=11, size=10"),
        ("0 00000 11001", 10, -1, "kept=-1, size=10"),
        ("0 00000 11001", 2**32, 3, "size=4294967296"),
        ("0 00000 11", 10, 3, "of width 0 in 2 to 2 bytes, got 1"),
        ("0 00000 11001 000000", 10, 3, "of width 0 in 2 to 2 bytes, got 3"),
        ("0 00000 11001 00000 00000000", 30, 3, "in the last byte, got 1 bytes more"),
        ("0 00000 11001", 10, 2, "expected 2 indices, got 3"),
        ("0 00000 11001 00001", 10, 3, "expected 3 indices, got 4"),  # in the padding
        ("0 00000 11 00000000", 30, 2, "in the last byte, got 1 bytes more"),
        ("0 10000 0 000001", 10, 1, "below 10, got 10"),
        ("0 10000 111 000111", 10, 3, "below 10, got 11"),
        ("0 00000 00 0", 10, 0, "in 1 to 1 bytes, got 2"),
        ("1 0000000 0", 10, 10, "in 1 to 1 bytes, got 2"),
        ("0 11111 00", LARGEST, LARGEST // 2, "8589934589"),  # refused by its length: nothing of that size is made
    ],
)
def test_what_is_wrong_is_said(bits: str, size: int, kept: int, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_indices(packed(bits), size, kept)


@pytest.mark.parametrize(
    ("bits", "size", "expected"),
    [
        ("0 00000 111 0000000", 30, [0, 1, 2]),  # seven bits of padding, and no more
        ("0 10000 1 00001", 10, [9]),  # the last coordinate that there is
        ("1", 0, []),
        ("1", LARGEST, []),
    ],
)
def test_what_is_just_right_is_read(bits: str, size: int, expected: list[int]) -> None:
    assert decode_indices(packed(bits), size, len(expected)).tolist() == expected


@given(subsets(), st.data())
def test_truncated_and_extended_bytes_are_a_wire_error(subset: tuple[Indices, int], data: st.DataObject) -> None:
    indices, size = subset
    coded = encode_indices(indices, size)
    with pytest.raises(WireError):
        decode_indices(coded[: data.draw(st.integers(0, len(coded) - 1))], size, indices.size)
    with pytest.raises(WireError):
        decode_indices(coded + data.draw(st.binary(min_size=1, max_size=9)), size, indices.size)


@settings(max_examples=300)
@given(subsets(), st.data())
def test_flipped_bits_are_a_wire_error_or_other_indices(subset: tuple[Indices, int], data: st.DataObject) -> None:
    indices, size = subset
    coded = bytearray(encode_indices(indices, size))
    for bit in data.draw(st.sets(st.integers(0, 8 * len(coded) - 1), min_size=1, max_size=3)):
        coded[bit // 8] ^= 1 << bit % 8
    try:
        again = decode_indices(bytes(coded), size, indices.size)
    except WireError:
        return
    assert_valid(again, size, indices.size)


@settings(max_examples=500)
@given(st.binary(max_size=60), st.integers(-1, 300) | st.integers(0, 2**33), st.integers(-1, 60))
def test_random_bytes_are_a_wire_error_or_indices(data: bytes, size: int, kept: int) -> None:
    for start in (data, bytes([len(data) % 32]) + data):  # the second has a width that is allowed
        try:
            indices = decode_indices(start, size, kept)
        except WireError:
            continue
        assert_valid(indices, size, kept)
