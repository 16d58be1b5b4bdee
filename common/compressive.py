"""Compressed sensing: a few random measurements of a sparse vector, and the vector back from them.

Both sides draw the measurement matrix from the public seed; it never travels.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.mask import Indices

Vector = NDArray[np.float64]

_PROTOCOL_TAG = b"fedsieve/measurement/1"
_QUANTILES = 1 << 16
_UNIT = 1 << 16  # an entry of the matrix is a whole number of 1 / (_UNIT * sqrt(rows))
_MAX_ENTRIES = 1 << 28
_BLOCK = 1 << 16
_FEW_ROWS = 256  # with more of them chance has no room left: the three searches differ in noise alone
_SOLVED = 1e-9  # a residual over the measurements that is rounding alone


def enough_rows(size: int, sparsity: int) -> int:
    """Return p = ceil(4 kappa log(d / kappa)), at least 3 and at least kappa: how many measurements recovery wants."""
    return max(3, sparsity, math.ceil(4 * sparsity * math.log(size / sparsity)))


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement matrix Psi by name, p = ``rows`` by d = ``size``, for vectors of kappa = ``sparsity`` entries."""

    seed: int
    epoch: int
    size: int
    rows: int
    sparsity: int

    def __post_init__(self) -> None:
        if not (0 <= self.seed < 2**63 and 0 <= self.epoch < 2**32):
            raise ConfigError(f"expected 0 <= seed < 2^63 and 0 <= epoch < 2^32, got {self.seed} and {self.epoch}")
        if not 1 <= self.sparsity <= self.size:
            raise ConfigError(
                f"expected 1 <= sparsity <= {self.size} parameters, got {self.sparsity} (set 'compressive-sparsity')"
            )
        if not self.sparsity <= self.rows or not 1 <= self.rows * self.size <= _MAX_ENTRIES:
            raise ConfigError(
                f"expected at least {self.sparsity} measurements and at most 2^28 entries of their matrix, got "
                f"{self.rows} of {self.size} parameters (set 'compressive-rows')"
            )

    @property
    def scale(self) -> float:
        """What a whole number in ``columns`` stands for."""
        return 1 / (_UNIT * math.sqrt(self.rows))

    def columns(self) -> NDArray[np.float32]:
        """Return the columns of Psi / ``scale`` as rows, shape (size, rows): whole numbers; shared and read-only.

        Computes: sqrt(rows) * Psi has entries of the standard normal distribution in 2^16 equally likely steps: 16-bit
        pieces of Philox4x64-10 words, keyed by SHA-256(tag, seed, epoch, size, rows), each replaced by the normal
        quantile of its middle, rounded to 1 / 2^16.
        Guarantees: independent of data; the same bits on every machine (whole numbers, which float32 holds exactly).
        Source: compressive-laplace, Algorithm 2, line 2.
        """
        return _draw(self.seed, self.epoch, self.size, self.rows)

    def column_bound(self) -> float:
        """Return max_j of the L1 norm of column j: how much 1 in the L1 norm of v can move Psi v, for this very Psi.

        Guarantees: not below the exact value (whole numbers are added up exactly, the product is rounded upwards).
        Source: compressive-laplace takes sqrt(rows). A column's L1 norm has mean sqrt(2 rows / pi), and the largest of
        d of them counts: with few rows it is above sqrt(rows) more often than not, with very many it stays below.
        """
        return _column_bound(self.seed, self.epoch, self.size, self.rows)

    def noise_scale(self, epsilon: float) -> float:
        """Return the scale of the Laplace noise that makes measurements ``epsilon``-DP where v moves by 1 in L1."""
        return self.column_bound() / epsilon

    def of(self, indices: Indices, values: Vector) -> Vector:
        """Return Psi v for the v that has ``values`` at ``indices`` and 0 elsewhere, shape (rows,)."""
        measured: Vector = (values @ self.columns()[indices].astype(np.float64)) * self.scale
        return measured


def largest_entries(vector: Vector, count: int) -> Indices:
    """Return the coordinates of the ``count`` largest magnitudes, sorted; of equal ones the earlier come first."""
    if count >= vector.size:
        return np.arange(vector.size, dtype=np.int64)
    magnitudes = np.abs(vector)
    limit = np.partition(magnitudes, vector.size - count)[vector.size - count]
    above = np.flatnonzero(magnitudes > limit)
    ties = np.flatnonzero(magnitudes == limit)[: count - above.size]
    return np.sort(np.concatenate([above, ties])).astype(np.int64, copy=False)


def recover(measurement: Measurement, measured: Vector) -> tuple[Indices, Vector]:
    """Return the coordinates and values of a ``sparsity``-sparse vector whose measurements are near ``measured``.

    Computes: CoSaMP. At most 6 (sparsity + 1) times: join the current support and the 2 sparsity largest entries of
    Psi^T (measured - Psi z), each over the length of its column (with few rows lengths differ so much that a wrong,
    longer column can hide the right one), fit ``measured`` there by least squares, keep the ``sparsity`` largest
    coefficients as z. A round depends on nothing but the support that it starts from: when one returns, nothing new
    would follow, and the search ends. The support with the least residual of all that were met is fitted once more,
    alone. With few rows chance can lead the search astray (once in ten thousand cases); it is then repeated with 3 and
    with 1 sparsity entries joining at once.
    Guarantees: a vector that is sparse enough, without noise, comes back exactly (up to rounding) with a probability
    that ``enough_rows`` makes close to 1; post-processing, so free of privacy cost.
    Edge cases: measurements that are all 0 give zeros. What is not finite is a ValueError.
    Source: Needell and Tropp (2009); compressive-laplace, Algorithm 1.
    """
    if not np.isfinite(measured).all():
        raise ValueError("expected finite measurements")
    target = measured / measurement.scale
    found = _search(measurement, target, 2)
    if measurement.rows < _FEW_ROWS:
        for width in (3, 1):
            if found[0] > _SOLVED * float(np.linalg.norm(target)):
                found = min(found, _search(measurement, target, width), key=lambda result: result[0])
    support = found[1]
    return support, _least_squares(measurement.columns()[support].astype(np.float64), target)


def _search(measurement: Measurement, target: Vector, width: int) -> tuple[float, Indices]:
    """Return the least residual that was met, and its support; ``width`` * sparsity entries join at once."""
    columns, sparsity = measurement.columns(), measurement.sparsity
    lengths = _column_lengths(measurement.seed, measurement.epoch, measurement.size, measurement.rows)
    support, residual = np.zeros(0, np.int64), target
    best = (float(np.linalg.norm(residual)), support)
    seen: set[bytes] = set()
    for _ in range(6 * (sparsity + 1)):
        correlations = (columns @ residual.astype(np.float32)) / lengths  # (size,)
        wanted = largest_entries(correlations.astype(np.float64), min(width * sparsity, measurement.size))
        joined = np.union1d(support, wanted)
        fitted = _least_squares(columns[joined].astype(np.float64), target)
        kept = largest_entries(fitted, sparsity)
        support = joined[kept]
        residual = target - fitted[kept] @ columns[support].astype(np.float64)
        if (length := float(np.linalg.norm(residual))) < best[0]:
            best = (length, support)
        if (key := support.tobytes()) in seen or length == 0:
            break
        seen.add(key)
    return best


def _least_squares(rows: Vector, target: Vector) -> Vector:
    """Return the coefficients b that bring b @ rows nearest to ``target``; the shortest of them where many do."""
    solution: Vector = np.linalg.lstsq(rows.T, target, rcond=None)[0].astype(np.float64, copy=False)
    return solution


@cache
def _quantiles() -> NDArray[np.float32]:
    """Return the middles of 2^16 equally likely slices of the standard normal distribution, in units of 1 / 2^16."""
    normal = NormalDist()
    upper = [round(normal.inv_cdf((i + 0.5) / _QUANTILES) * _UNIT) for i in range(_QUANTILES // 2, _QUANTILES)]
    return np.array([-value for value in reversed(upper)] + upper, np.float32)


@lru_cache(maxsize=2)
def _draw(seed: int, epoch: int, size: int, rows: int) -> NDArray[np.float32]:
    name = _PROTOCOL_TAG + struct.pack("<QQQQ", seed, epoch, size, rows)
    key = int.from_bytes(hashlib.sha256(name).digest()[:16], "little")
    entries = size * rows
    words = np.random.Philox(key=key, counter=0).random_raw(-(-entries // 4)).astype("<u8", copy=False)
    pieces = words.view("<u2")[:entries]
    columns = np.empty(entries, np.float32)
    for start in range(0, entries, _BLOCK):  # block by block: the lookup widens its indices to 8 bytes each
        np.take(_quantiles(), pieces[start : start + _BLOCK], out=columns[start : start + _BLOCK], mode="clip")
    columns.setflags(write=False)
    return columns.reshape(size, rows)


@lru_cache(maxsize=2)
def _column_lengths(seed: int, epoch: int, size: int, rows: int) -> NDArray[np.float32]:
    """Return the L2 norms of ``columns``; 1 where a column is zero."""
    columns = _draw(seed, epoch, size, rows)
    lengths: NDArray[np.float32] = np.sqrt(np.einsum("ij,ij->i", columns, columns))
    return np.where(lengths > 0, lengths, np.float32(1))


@lru_cache(maxsize=64)
def _column_bound(seed: int, epoch: int, size: int, rows: int) -> float:
    columns = _draw(seed, epoch, size, rows)
    largest = int(np.abs(columns).sum(1, dtype=np.float64).max())  # whole numbers below 2^53: exact
    return math.nextafter(largest / math.sqrt(rows) / _UNIT * (1 + 2.0**-51), math.inf)
