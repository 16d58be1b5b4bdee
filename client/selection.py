"""Choosing the coordinates that move by looking at the data, privately.

The sum over a batch is first divided by the public expected batch, so that a record moves it by at most S1 / b in norm,
with S1 the clip norm and b the expected batch. Selection spends privacy of its own: ``common.renyi`` says how much.
"""

import math

import numpy as np
from numpy.typing import NDArray

from common.mask import Indices
from common.randomness import RoundRandomness, gumbel, laplace

Vector = NDArray[np.float64]

_FIRST_SCAN = 1024


def select_exponential(
    mean: Vector,
    *,
    picks: int,
    pick_epsilon: float,
    entry_bound: float,
    record_bound: float,
    randomness: RoundRandomness,
) -> Indices:
    """Return ``picks`` coordinates of ``mean``, sorted, by the exponential mechanism.

    Computes: with utilities u = min(|mean|, entry_bound) and their sensitivity D = min(entry_bound, record_bound), the
    ``picks`` largest of u + 2 D / pick_epsilon * Gumbel. That is one draw of d numbers, and it has the distribution of
    peeling: ``picks`` times the exponential mechanism with probabilities proportional to exp(pick_epsilon u / (2 D)),
    each time without what was taken before.
    Guarantees: each pick has range ``pick_epsilon`` (all log-likelihood ratios lie in one interval of that length), so
    it is (pick_epsilon^2 / 8)-zCDP, where adding or removing a record moves a coordinate by at most ``record_bound``.
    The set alone is released; its order is forgotten.
    Edge cases: what is not finite has utility 0: it must not win, and the comparison must not fail. All coordinates
    are taken where ``picks`` is d.
    Source: dp-selection-wide-networks, Algorithm 4; for one shot and for the range Durfee and Rogers (2019,
    arXiv:1905.04273); for what a range costs ``common.renyi.exponential_rho``.
    """
    _check(mean, picks, pick_epsilon, record_bound)
    _require(0 < entry_bound < math.inf, "a finite entry_bound > 0", entry_bound)
    utilities = np.abs(mean)
    np.minimum(utilities, entry_bound, out=utilities)
    utilities[~np.isfinite(mean)] = 0.0
    scale = 2 * min(entry_bound, record_bound) / pick_epsilon
    noisy = utilities / scale + gumbel(randomness, mean.size)
    return np.sort(np.argpartition(noisy, mean.size - picks)[mean.size - picks :]).astype(np.int64, copy=False)


def select_sparse_vector(
    mean: Vector,
    *,
    picks: int,
    pick_epsilon: float,
    threshold: float,
    record_bound: float,
    randomness: RoundRandomness,
) -> Indices:
    """Return at most ``picks`` coordinates of ``mean`` whose magnitude passes ``threshold``, sorted; there may be none.

    Computes: coordinates are visited in a random order that ignores the data. One is taken where |mean| + Lap(2 s) >=
    threshold + rho, with s = 2 record_bound / pick_epsilon and rho = Lap(s), which is drawn anew after each that is
    taken. The visit ends with the coordinate number ``picks``.
    Guarantees: from one taken coordinate to the next is the mechanism AboveThreshold, which is pick_epsilon-DP; the
    whole composes ``picks`` of them, adaptively, however many were taken.
    Edge cases: what is not finite counts as 0.
    Source: dp-selection-wide-networks, Algorithm 1, without its numeric answers (the Gaussian step gives those) and
    stopped at ``picks``: the paper stops when its count exceeds c1, which is one answer more than it pays for. In the
    order of the coordinates, as there, the first layers would win. AboveThreshold: Dwork and Roth (2014), Section 3.6.
    """
    _check(mean, picks, pick_epsilon, record_bound)
    _require(0 <= threshold < math.inf, "a finite threshold >= 0", threshold)
    scale = 2 * record_bound / pick_epsilon
    order = np.argsort(randomness.open_uniforms(mean.size), kind="stable")
    queries = np.where(np.isfinite(mean), np.abs(mean), 0.0) + 2 * scale * laplace(randomness, mean.size)
    queries = queries[order]
    limits = threshold + scale * laplace(randomness, picks)
    taken, start = [], 0
    for limit in limits:
        if (found := _first_at_least(queries, limit, start)) is None:
            break
        taken.append(found)
        start = found + 1
    return np.sort(order[taken]).astype(np.int64, copy=False)


def select_random(size: int, *, picks: int, randomness: RoundRandomness) -> Indices:
    """Return ``picks`` of ``size`` coordinates, sorted, uniformly at random: no look at the data, no cost."""
    _require(1 <= picks <= size, f"1 <= picks <= {size}", picks)
    words = randomness.open_uniforms(size)
    return np.sort(np.argpartition(words, picks - 1)[:picks]).astype(np.int64, copy=False)


def second_clip(selected: Vector, norm: float) -> Vector:
    """Return the selected coordinates of a mean, projected onto the ball of radius ``norm`` (S2).

    Edge cases: zeros where a value is not finite.
    """
    length = float(np.linalg.norm(selected))
    if not math.isfinite(length):
        return np.zeros_like(selected)
    return selected if length <= norm else selected * (norm / length)


def second_clip_sensitivity(record_bound: float, norm: float) -> float:
    """Return how far a record can move what ``second_clip`` returns, for the same selected coordinates.

    Computes: min(record_bound, 2 norm). Projection onto a ball moves no two points apart, so that what a record moves
    the mean by, ``record_bound`` = S1 / b, stays a bound; and two points of the ball are at most 2 norm apart.
    Source: dp-selection-wide-networks, Algorithm 3, which takes min(S1 / b, S2): wrong where S1 / b > S2, since one
    record can turn the mean around.
    """
    return min(record_bound, 2 * norm)


def _first_at_least(queries: Vector, limit: float, start: int) -> int | None:
    """Return the first position from ``start`` on that reaches ``limit``; reads ahead in doubling stretches."""
    length = _FIRST_SCAN
    while start < queries.size:
        stretch = queries[start : start + length] >= limit
        if stretch.any():
            return start + int(stretch.argmax())
        start, length = start + length, 2 * length
    return None


def _check(mean: Vector, picks: int, pick_epsilon: float, record_bound: float) -> None:
    _require(1 <= picks <= mean.size, f"1 <= picks <= {mean.size}", picks)
    _require(0 < pick_epsilon < math.inf, "a finite pick_epsilon > 0", pick_epsilon)
    _require(0 < record_bound < math.inf, "a finite record_bound > 0", record_bound)


def _require(ok: bool, expected: str, value: float) -> None:
    if not ok:
        raise ValueError(f"selection: expected {expected}, got {value}")
