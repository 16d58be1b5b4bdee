import contextlib
import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.errors import WireError
from common.integers import decode_integers, encode_integers, grid_entropy_bits, largest_bytes

INT32 = st.integers(-(2**31), 2**31 - 1)
ANY = hnp.arrays(np.int32, st.integers(0, 60), elements=st.one_of(st.integers(-3, 3), INT32))


def empirical_entropy(values: np.ndarray) -> float:
    counts = np.unique(values, return_counts=True)[1] / values.size
    return float(-(counts * np.log2(counts)).sum())


@pytest.mark.parametrize(
    ("values", "golden"),
    [
        ([], "0000803f010000000000"),
        ([0, 0, 0], "0000803f01000000000000030000"),
        ([1, -2, 0, 3, -1, 0, 0, 1], "0c82623e030000000000c2290aaa"),
        ([0, 1, -1, 2_000_000_000, 0], "a7d2213f0500010000009a4abc7700943577"),
    ],
)
def test_golden_bytes(values: list[int], golden: str) -> None:
    assert encode_integers(np.array(values, np.int32)).hex() == golden
    assert decode_integers(bytes.fromhex(golden), len(values)).tolist() == values


def test_golden_bytes_of_many_are_the_same_on_every_machine() -> None:
    # Multiples of a prime modulo a power of two: a stream that needs no generator.
    numbers = np.arange(20_000) * 7919 % 4096
    values = np.rint((numbers - 2048) / 700).astype(np.int32)
    data = encode_integers(values)
    assert (decode_integers(data, values.size) == values).all()
    assert (len(data), zlib.crc32(data)) == (6970, 2450960867)


@given(ANY)
@example(np.array([-(2**31)] * 3, np.int32))
@example(np.array([2**31 - 1, -(2**31), 0], np.int32))
def test_round_trip(values: np.ndarray) -> None:
    data = encode_integers(values)
    assert len(data) <= largest_bytes(values.size)
    assert (decode_integers(data, values.size) == values).all()


@pytest.mark.parametrize("deviation", [0.3, 1.0, 2.0, 8.0, 60.0])
def test_gaussian_integers_cost_their_entropy(deviation: float) -> None:
    values = np.rint(np.random.default_rng(1).normal(0, deviation, 300_000)).astype(np.int32)
    bits = 8 * len(encode_integers(values))
    assert bits <= 1.01 * empirical_entropy(values) * values.size


def test_outliers_do_not_spoil_the_rest() -> None:
    values = np.rint(np.random.default_rng(1).normal(0, 2, 100_000)).astype(np.int32)
    spoiled = values.copy()
    spoiled[::10_000] = np.array([2**31 - 1, -(2**31)] * 5, np.int32)
    assert len(encode_integers(spoiled)) < len(encode_integers(values)) + 10 * 8


def test_entropy_of_the_grid() -> None:
    assert grid_entropy_bits(0.01) == pytest.approx(math.log2(math.sqrt(2 * math.pi * math.e) / 0.01), abs=1e-3)
    values = np.rint(np.random.default_rng(1).normal(0, 1, 1_000_000)).astype(np.int32)
    assert grid_entropy_bits(1.0) == pytest.approx(empirical_entropy(values), abs=5e-3)


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 20))
def test_random_bytes_are_an_error_or_some_integers(data: bytes, count: int) -> None:
    with contextlib.suppress(WireError):
        assert decode_integers(data, count).shape == (count,)


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 255), st.integers(0, 200), st.integers(-5, 5))
def test_damage_is_an_error_or_some_integers(position: int, flip: int, cut: int, more: int) -> None:
    values = np.rint(np.random.default_rng(2).normal(0, 3, 100)).astype(np.int32)
    values[50] = 10_000
    data = bytearray(encode_integers(values))
    data[position % len(data)] ^= flip
    with contextlib.suppress(WireError):
        assert decode_integers(bytes(data[: len(data) - cut]), 100 + more).shape == (100 + more,)


def head(decay: float = 1.0, span: int = 1, escapes: int = 0) -> bytes:
    return struct.pack("<fHI", decay, span, escapes)


BEYOND_ONE = float(np.nextafter(np.float32(1), np.float32(2)))
SMALLEST = float(np.float32(1e-45))
ZEROS = encode_integers(np.zeros(5, np.int32))


@pytest.mark.parametrize(
    ("inside", "outside", "count", "message"),
    [
        (head(), head()[:-1], 0, "expected 10 to 18 bytes for 0 integers, got 9"),
        (head(decay=1.0), head(decay=BEYOND_ONE), 0, "expected 0 < decay <= 1"),
        (head(decay=SMALLEST), head(decay=0.0), 0, "expected 0 < decay <= 1"),
        (head(span=1), head(span=0), 0, "1 <= span <= 32767"),
        (head(span=2**15 - 1), head(span=2**15), 0, "1 <= span <= 32767"),
        (head(), head() + bytes(4), 0, "nothing after the head"),
        (head(), head(escapes=1) + bytes(4), 0, "lengths disagree"),
        (ZEROS, ZEROS + bytes(58 - len(ZEROS)), 5, "do not use up"),  # as long as escapes alone could be
        (ZEROS, ZEROS + bytes(59 - len(ZEROS)), 5, "expected 10 to 58 bytes for 5 integers, got 59"),
    ],
)
def test_the_last_bytes_that_are_read_and_the_first_that_are_not(
    inside: bytes, outside: bytes, count: int, message: str
) -> None:
    assert decode_integers(inside, count).tolist() == [0] * count
    with pytest.raises(WireError, match=message):
        decode_integers(outside, count)


def test_what_is_wrong_is_said() -> None:
    data = encode_integers(np.array([1, -2, 0, 3, 500], np.int32))
    for bad, count, message in [
        (b"", 5, "expected 10 to 58 bytes for 5 integers, got 0"),
        (data + bytes(100), 5, "expected 10 to 58 bytes"),
        (data[:-1], 5, "lengths disagree"),
        (b"\0\0\0\0" + data[4:], 5, "expected 0 < decay <= 1"),
        (b"\0\0\xc0\x7f" + data[4:], 5, "expected 0 < decay <= 1"),
        (data[:4] + b"\0\0" + data[6:], 5, "1 <= span"),
        (encode_integers(np.zeros(0, np.int32)) + bytes(4), 0, "nothing after the head"),
        (encode_integers(np.array([1, 2, 3], np.int32)) + bytes(8), 3, "do not use up"),
    ]:
        with pytest.raises(WireError, match=message):
            decode_integers(bad, count)
