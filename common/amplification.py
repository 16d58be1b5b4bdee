"""Renyi curves of steps that are not the sampled Gaussian mechanism alone, amplified by Poisson sampling."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]


def composed_rdp(orders: Curve, noise_multiplier: float, selection_rho: float, pure_epsilon: float) -> Curve:
    """Return the Renyi divergence of a release without sampling, at each of ``orders``.

    Computes: orders / (2 noise_multiplier^2) + selection_rho * orders + min(pure_epsilon, orders pure_epsilon^2 / 2):
    Gaussian noise, a zCDP selection and a pure mechanism, on the same data.
    Source: Bun and Steinke, "Concentrated differential privacy" (2016), Propositions 1.4 and 1.6.
    """
    gaussian = orders / (2 * noise_multiplier**2)
    pure = np.minimum(pure_epsilon, orders * pure_epsilon**2 / 2)
    composed: Curve = gaussian + selection_rho * orders + pure
    return composed


def sampled_rdp(curve: Callable[[Curve], Curve], sampling_rate: float, orders: Curve) -> Curve:
    """Return the Renyi curve of a mechanism with ``curve`` on a Poisson sample with rate q = ``sampling_rate``.

    Computes: for an integer order a, log(A) / (a - 1) with
    A = (1-q)^(a-1) (a q - q + 1) + C(a,2) q^2 (1-q)^(a-2) e^curve(2) + 3 sum over l = 3..a of C(a,l) q^l (1-q)^(a-l)
    e^((l-1) curve(l)); between integers log(A), which is convex in a and 0 at 1, on the chord.
    Guarantees: an upper bound for any mechanism with that curve, neighbours by adding or removing one record; never
    above the curve itself, which sampling cannot worsen.
    Edge cases: q = 1 is the curve.
    Source: Zhu and Wang, "Poisson subsampled Renyi differential privacy" (2019), Theorem 5.
    """
    plain = curve(orders)
    if sampling_rate == 1:
        return plain
    above = np.ceil(orders).astype(int)
    logs = {order: _log_moment(curve, sampling_rate, int(order)) for order in np.unique((above, above - 1))}
    share = orders - (above - 1)
    chord = np.array([logs[order] for order in above]) * share + np.array([logs[order] for order in above - 1]) * (
        1 - share
    )
    amplified: Curve = np.minimum(plain, chord / (orders - 1))
    return amplified


def _log_moment(curve: Callable[[Curve], Curve], q: float, order: int) -> float:
    if order == 1:
        return 0.0
    parts = [(order - 1) * math.log1p(-q) + math.log(order * q - q + 1)]
    picked = np.arange(2, order + 1, dtype=np.float64)
    logs_of_factorials = np.cumsum(np.log(np.arange(1, order + 1)))  # of 1! to order!
    unpicked = np.concatenate((logs_of_factorials[order - 3 :: -1] if order > 2 else [], [0.0]))
    binomials = logs_of_factorials[-1] - logs_of_factorials[1:] - unpicked
    terms = binomials + picked * math.log(q) + (order - picked) * math.log1p(-q) + (picked - 1) * curve(picked)
    terms[1:] += math.log(3)
    return float(np.logaddexp.reduce(np.concatenate((parts, terms))))
