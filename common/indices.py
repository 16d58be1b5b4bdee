"""Sorted coordinates as bytes: Golomb-Rice coded gaps, for the coordinates that a site chose itself.

Layout: one string of bits, least significant bit of each byte first, padded with zeros to a whole byte. Listed are the
kept coordinates or, where more than half is kept, the others. Each stands for its gap, the number of coordinates passed
over since the one before:

- a one, where ``width`` is ``_usual_width``; else a zero and the 5 bits of ``width``, the lowest first;
- the low ``width`` bits of all gaps, one bit plane after the other, the lowest plane first;
- what is left of each gap, ``gap >> width``, in unary: that many zeros, then a one.

One code is enough. With ``width`` 0 it is the bitmap, cut after its last one; Elias-Fano coding is never shorter, for
the parts of the gaps add up to at most what it writes; and uint32 wins by a byte only, for one or two coordinates near
2^32. (Proof for Elias-Fano: sum of ``gap >> width`` <= (sum of gaps) ``>> width`` <= last coordinate ``>> width``.)
"""

import math

import numpy as np
from numpy.typing import NDArray

from common.errors import WireError
from common.mask import Indices

_MAX_WIDTH = 31
_WIDTH_BITS = 5


def encode_indices(indices: Indices, size: int) -> bytes:
    """Return ``indices``, sorted, unique and below ``size`` < 2^32, as bytes; they are trusted to be that.

    Guarantees: at most 1 + ceil(size / 8) bytes. Of a uniformly random subset the bits exceed ``index_entropy_bits``
    by 2.2 % at most up to a density of 0.1 and by 4.3 % at the worst density, 0.38; width and padding come to one byte
    at most, and to less than two where another width than the usual one is shorter.
    Edge cases: nothing or everything kept is one byte.
    Source: Rice, "Some practical universal noiseless coding techniques", JPL 79-22 (1979).
    """
    listed = indices if 2 * indices.size <= size else _others(indices, size)
    gaps = (np.diff(listed, prepend=-1) - 1).astype(np.uint32)
    width, usual = _best_width(gaps), _usual_width(size, gaps.size)
    if width != usual and _bits(gaps, usual) <= _bits(gaps, width) + _WIDTH_BITS:
        width = usual
    head = [1] if width == usual else [0, *(width >> bit & 1 for bit in range(_WIDTH_BITS))]
    ends = np.cumsum(gaps >> width, dtype=np.int64) + np.arange(gaps.size)
    planes = len(head) + width * gaps.size
    bits = np.zeros(planes + (int(ends[-1]) + 1 if ends.size else 0), np.uint8)
    bits[: len(head)] = head
    low = bits[len(head) : planes].reshape(width, gaps.size)
    for plane in range(width):
        low[plane] = (gaps >> plane) & 1
    bits[planes:][ends] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def decode_indices(data: bytes | memoryview, size: int, kept: int) -> Indices:
    """Parse ``kept`` coordinates of ``size`` < 2^32.

    Guarantees: the result is sorted, unique and below ``size``; any other input is a WireError, and so are bytes too
    many or padding that is not zero. Memory stays within a small multiple of 8 bytes a kept coordinate and of
    ``data``, and ``data`` that no such coordinates could have given is refused before it is unpacked.
    """
    if not 0 <= kept <= size < 2**32:
        raise WireError(f"expected 0 <= kept <= size < 2^32, got kept={kept}, size={size}")
    if not len(data):
        raise WireError(f"expected {kept} indices below {size}, got no bytes")
    count = min(kept, size - kept)
    usual = data[0] & 1
    width, head = (_usual_width(size, count), 1) if usual else (data[0] >> 1 & _MAX_WIDTH, 1 + _WIDTH_BITS)
    shortest = head + (width + 1) * count
    longest = shortest + ((size - count) >> width if count else 0)
    if not _bytes_of(shortest) <= len(data) <= _bytes_of(longest):
        expected = f"{_bytes_of(shortest)} to {_bytes_of(longest)} bytes"
        raise WireError(f"expected {count} indices of width {width} in {expected}, got {len(data)}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[head:]
    unary = bits[width * count :].view(np.bool_)
    if (ones := int(np.count_nonzero(unary))) != count:  # counted before a position of 8 bytes is made of each
        raise WireError(f"expected {count} indices, got {ones}")
    ends = np.flatnonzero(unary)
    if count and unary.size - int(ends[-1]) > 8:
        raise WireError(
            f"expected the last index in the last byte, got {(unary.size - int(ends[-1]) - 1) // 8} bytes more"
        )
    low = np.zeros(count, np.int64)
    for plane in reversed(range(width)):
        low <<= 1
        low |= bits[plane * count : (plane + 1) * count]
    # Zeros before a one, over all gaps so far: its position less the ones before it.
    rank = np.arange(count)
    listed = ((ends - rank) << width) + np.cumsum(low) + rank
    if count and listed[-1] >= size:
        raise WireError(f"expected indices below {size}, got {listed[-1]}")
    return listed if 2 * kept <= size else _others(listed, size)


def index_entropy_bits(size: int, kept: int) -> float:
    """Return log2 of C(size, kept): the bits that a uniformly random subset takes at least, on average."""
    return max(0.0, (math.lgamma(size + 1) - math.lgamma(kept + 1) - math.lgamma(size - kept + 1)) / math.log(2))


def _usual_width(size: int, count: int) -> int:
    """Return the width that suits ``count`` coordinates drawn at random from ``size``; both sides know these numbers.

    Computes: the first width with 2^width >= 0.4812 (mean gap + 1/2), in whole numbers, so that no machine differs.
    Source: Kiely, "Selecting the Golomb parameter in Rice coding", IPN Progress Report 42-159 (2004): p^(2^width) stays
    below the golden ratio less 1, whose logarithm is -0.4812, where a gap goes on with probability p.
    """
    if not count:
        return 0
    wanted = -(-4812 * (2 * (size - count) + count) // (20_000 * count))  # rounded up
    return min((wanted - 1).bit_length(), _MAX_WIDTH) if wanted > 1 else 0


def _best_width(gaps: NDArray[np.uint32]) -> int:
    """Return the width with the fewest ``_bits``.

    A plane more adds ``len(gaps) - sum(ceil((gaps >> width) / 2))`` bits. That only grows with the width, so the first
    minimum met is the minimum; and it is no longer negative once 2^width reaches the mean, so the search starts there.
    """
    if not gaps.size:
        return 0
    width = min((_zeros(gaps, 0) // gaps.size).bit_length(), _MAX_WIDTH)
    zeros = _zeros(gaps, width)
    while width and (more := _zeros(gaps, width - 1)) < zeros + gaps.size:
        width, zeros = width - 1, more
    return width


def _bits(gaps: NDArray[np.uint32], width: int) -> int:
    """Return the bits of all gaps."""
    return (width + 1) * gaps.size + _zeros(gaps, width)


def _zeros(gaps: NDArray[np.uint32], width: int) -> int:
    """Return the number of zeros in the unary part."""
    return int((gaps >> width).sum(dtype=np.uint64))


def _others(indices: Indices, size: int) -> Indices:
    """Return the coordinates below ``size`` that are not in ``indices``."""
    others = np.ones(size, np.bool_)
    others[indices] = False
    return np.flatnonzero(others)


def _bytes_of(bits: int) -> int:
    return -(-bits // 8)
