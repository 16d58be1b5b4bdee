"""Small integers as bytes: a range coder under a discrete Gaussian, with an escape for outliers.

Layout, little-endian: ``decay`` (float32), ``span`` (uint16), number of escapes (uint32), the words of the range coder
(uint32 each), then the escaped integers (int32 each, in order).

The model of an integer i is p(i) proportional to r^(i^2) for |i| <= ``span``, with r = 1 - ``decay``: a Gaussian of
variance -1 / (2 ln r), sampled at the integers. Everything else is one more symbol, the escape. Both sides build the
table from ``decay`` by multiplications alone, in one order, so that it has the same bits on every machine; neither
exp nor erf of a platform's library is involved. ``decay`` is fitted to the integers that are sent: it says nothing
about the data that they do not say.
"""

import itertools
import math
import struct
from functools import lru_cache
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

from common.errors import WireError

Integers = NDArray[np.int32]

_HEAD = struct.Struct("<fHI")
_SPAN_IN_DEVIATIONS = 6.0  # farther out the Gaussian costs more than an escape
_MOST_SPAN = 2**15 - 1
_MOST_TRIMS = 8
_LEAST_DECAY = 1e-9


def largest_bytes(count: int) -> int:
    """Return a bound on the length of ``count`` coded integers, whatever they are: all may be escapes."""
    return _HEAD.size + 8 * count + 8


def grid_entropy_bits(grid: float) -> float:
    """Return the entropy, in bits, of standard normal noise rounded to multiples of ``grid``.

    Computes: -sum of p(i) log2 p(i), p(i) = Phi((i + 1/2) grid) - Phi((i - 1/2) grid): 2.10 bits at a grid of 1, 3.06
    at 0.5; about log2(sqrt(2 pi e) / grid) for fine grids.
    """
    reach = math.ceil(9 / grid)
    edges = [math.erf((i - 0.5) * grid / math.sqrt(2)) / 2 for i in range(-reach, reach + 2)]
    masses = [high - low for low, high in itertools.pairwise(edges)]
    return -sum(mass * math.log2(mass) for mass in masses if mass > 0)


def encode_integers(values: Integers) -> bytes:
    """Return ``values`` as bytes."""
    sizes = np.abs(values.astype(np.int64))
    decay, span = _fit(sizes)
    outside = sizes > span
    escapes = np.ascontiguousarray(values[outside], "<i4")
    symbols = (values + np.int32(span)).astype(np.int32, copy=False)
    symbols[outside] = 2 * span + 1
    coder = constriction.stream.queue.RangeEncoder()
    if values.size:
        coder.encode(symbols, _model(decay, span, escapes.size / values.size))
    words = coder.get_compressed().astype("<u4", copy=False)
    return b"".join((_HEAD.pack(decay, span, escapes.size), words.data, escapes.data))


def decode_integers(data: bytes | memoryview, count: int) -> Integers:
    """Parse ``count`` integers.

    Guarantees: the integers that were encoded, or, for bytes that no encoder made, a WireError or some ``count``
    integers; the memory needed is bounded by ``count``, the length of ``data`` and a table of 2^16 symbols.
    """
    if not _HEAD.size <= len(data) <= largest_bytes(count):
        raise WireError(
            f"expected {_HEAD.size} to {largest_bytes(count)} bytes for {count} integers, got {len(data)} bytes"
        )
    decay, span, escapes = _HEAD.unpack_from(data)
    words_end = len(data) - 4 * escapes
    if escapes > count or words_end < _HEAD.size or (words_end - _HEAD.size) % 4:
        raise WireError(f"lengths disagree: {len(data)} bytes for {count} integers, of which {escapes} are escaped")
    if not 0 < decay <= 1 or not 1 <= span <= _MOST_SPAN:
        raise WireError(f"expected 0 < decay <= 1 and 1 <= span <= {_MOST_SPAN}, got {decay} and {span}")
    if not count:
        if len(data) != _HEAD.size:
            raise WireError(f"expected nothing after the head of 0 integers, got {len(data)} bytes")
        return np.empty(0, np.int32)
    words = np.frombuffer(data[_HEAD.size : words_end], "<u4").astype(np.uint32)  # a copy: aligned, wherever they lay
    symbols = _decode_symbols(words, _model(decay, span, escapes / count), count)
    outside = symbols == 2 * span + 1
    if int(outside.sum()) != escapes:
        raise WireError(f"expected {escapes} escapes, found {int(outside.sum())}: the integers were damaged")
    values: Integers = symbols - np.int32(span)
    values[outside] = np.frombuffer(data[words_end:], "<i4")
    return values


def _decode_symbols(words: NDArray[np.uint32], model: Any, count: int) -> Integers:
    decoder = constriction.stream.queue.RangeDecoder(words)
    try:
        symbols: Integers = decoder.decode(model, count)
    except (AssertionError, ValueError) as error:  # words that no encoder makes
        raise WireError(f"the coded integers are damaged: {error}") from error
    if not decoder.maybe_exhausted():
        raise WireError(f"{count} integers do not use up the {4 * words.size} bytes that are there for them")
    return symbols


def _fit(sizes: NDArray[np.int64]) -> tuple[float, int]:
    """Return the ``decay`` and ``span`` that code integers of these ``sizes`` best.

    The model's variance is the mean square of what lies inside the span. Outliers are not coded under the Gaussian, so
    they must not widen it: they are trimmed until the rest lies within six deviations.
    """
    span = int(sizes.max(initial=0))
    inside = sizes
    for _ in range(_MOST_TRIMS):
        square = _mean_square(inside)
        reach = min(max(1, math.ceil(_SPAN_IN_DEVIATIONS * math.sqrt(square))), _MOST_SPAN)
        if reach >= span:
            break
        span, inside = reach, inside[inside <= reach]
    decay = float(np.float32(-math.expm1(-_rate(_mean_square(inside)))))
    return min(max(decay, _LEAST_DECAY), 1.0), min(max(span, 1), _MOST_SPAN)


def _mean_square(sizes: NDArray[Any]) -> float:
    return float(np.square(sizes, dtype=np.float64).mean()) if sizes.size else 0.0


def _rate(variance: float) -> float:
    """Return b for which p(i) proportional to exp(-b i^2) has the given ``variance`` over all integers.

    b = 1 / (2 variance) from a variance of one half on, up to a relative error of 1e-3; below, by bisection.
    """
    if variance >= 0.5:
        return 0.5 / variance
    low, high = 1.0, 100.0  # variances 0.5 and 0
    for _ in range(40):
        middle = (low + high) / 2
        weights = [math.exp(-middle * i * i) for i in range(1, 6)]
        found = 2 * sum(i * i * weight for i, weight in enumerate(weights, 1)) / (1 + 2 * sum(weights))
        low, high = (middle, high) if found > variance else (low, middle)
    return low


@lru_cache(maxsize=4)
def _model(decay: float, span: int, escaped: float) -> Any:
    """Return the coder's table: symbols 0 .. 2 span are the integers from -span on, the last one is the escape."""
    base = 1.0 - decay
    # r^(i^2) by r^((i+1)^2) = r^(i^2) r^(2i+1): cumulative products run in order, so their bits are the same anywhere.
    odd_powers = np.cumprod(np.concatenate(([base], np.full(span - 1, base * base))))
    side = np.cumprod(odd_powers)
    table = np.concatenate((side[::-1], [1.0], side))
    table *= (1.0 - escaped) / float(np.cumsum(table)[-1])
    return constriction.stream.model.Categorical(np.append(table, escaped), perfect=False)
