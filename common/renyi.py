"""Renyi curves of the mechanisms that are not one Gaussian, and what Poisson sampling makes of any of them.

A curve gives the Renyi divergence of a mechanism at each of an array of orders above 1: the larger one of the two
directions, adding and removing one record. Curves of mechanisms that look at the same batch, one after the other, add
up; sampling comes after that, and the sampled steps add up again.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from common.errors import AccountingError

Orders = NDArray[np.float64]
Curve = Callable[[Orders], NDArray[np.float64]]


def gaussian_curve(noise_multiplier: float) -> Curve:
    """Return the curve of Gaussian noise whose std is ``noise_multiplier`` times the L2 sensitivity: a / (2 z^2).

    Edge cases: infinite noise says nothing.
    Source: Mironov (2017), Corollary 3.
    """
    return lambda orders: orders / (2 * noise_multiplier**2)


def zcdp_curve(rho: float) -> Curve:
    """Return the curve of a ``rho``-zCDP mechanism: rho * a. Source: Bun and Steinke (2016), Definition 1.1."""
    return lambda orders: rho * orders


def exponential_rho(pick_epsilon: float, picks: int) -> float:
    """Return rho of ``picks`` adaptive picks of the exponential mechanism of range ``pick_epsilon`` each.

    Computes: picks * pick_epsilon^2 / 8.
    Source: Cesar and Rogers (2021), Lemma 3 (bounded range implies epsilon^2 / 8-zCDP).
    """
    return picks * pick_epsilon**2 / 8


def sparse_vector_rho(pick_epsilon: float, picks: int) -> float:
    """Return rho of a sparse vector search that stops after ``picks``, each of them ``pick_epsilon``-DP.

    Computes: picks * pick_epsilon^2 / 2.
    Source: Bun and Steinke (2016), Proposition 1.4 (epsilon-DP implies epsilon^2 / 2-zCDP) and Lemma 1.7.
    """
    return picks * pick_epsilon**2 / 2


def pure_curve(epsilon: float) -> Curve:
    """Return the curve of an ``epsilon``-DP mechanism, such as Laplace noise on a vector of L1 sensitivity 1 / scale.

    Computes: log((e^(a eps) + e^((1 - a) eps)) / (1 + e^eps)) / (a - 1), that of randomised response, of which every
    epsilon-DP mechanism is a processing.
    Source: Kairouz, Oh and Viswanath (2015); Mironov (2017), Proposition 5.
    """

    def curve(orders: Orders) -> NDArray[np.float64]:
        moment = np.logaddexp(orders * epsilon, (1 - orders) * epsilon) - np.logaddexp(0.0, epsilon)
        return np.asarray(moment / (orders - 1))

    return curve


def added(*curves: Curve) -> Curve:
    """Return the curve of mechanisms that are applied to the same batch, each knowing what the others gave."""
    return lambda orders: np.sum([curve(orders) for curve in curves], axis=0)


def sampled(curve: Curve, sampling_rate: float, orders: Orders) -> NDArray[np.float64]:
    """Return the curve of a mechanism on a Poisson sample with rate q, at ``orders``, for any mechanism at all.

    Computes, with e(a) the mechanism's curve, P without and R with the record, M = (1 - q) P + q R:
    - D_a(M | P) at whole a: log(sum over l of C(a, l) (1 - q)^(a - l) q^l e^((l - 1) e(l))) / (a - 1), the binomial
      expansion of the moment, its terms l = 0 and 1 being exact; between whole orders (a - 1) D_a is convex in a, so
      that the chord is above it; below 2 also log(1 + q^a e^((a - 1) e(a)) + a (a - 1) / 2 (1 - q)^(a - 2) q^2) /
      (a - 1), far smaller where the mechanism alone gives much away;
    - D_a(P | M): log(1 + ((1 - q)^(1 - a) - 1 - (a - 1) q) (e^(e(2)) - 1)) / (a - 1), and -log(1 - q) and the mean
      log(1 - q + q e^((a - 1) e(a))) / (a - 1) where they are smaller;
    the larger one of the two; or the expansion with its terms from l = 3 on three times, which holds for both
    directions and is smaller for large q and small a; and never more than e(a).
    Guarantees: an upper bound for adding and for removing a record. The other records' sample is averaged over, under
    which the divergence does not grow (it is jointly quasi-convex).
    Edge cases: q = 1 is the mechanism itself. Infinite stays infinite.
    Source: the first expansion is Mironov, Talwar and Zhang (2019); with its factor 3 it is Zhu and Wang (2019),
    Theorem 5, which alone would charge for a mechanism that says nothing. The second direction is ours: with
    L = R / P the moment is E_P[(1 + q (L - 1))^(1 - a)]. For f(x) = (1 + x)^(1 - a) the remainder (f(x) - f(0) -
    f'(0) x) / x^2 falls with x, because the third derivative of f is negative; x >= -q, so it is largest at -q.
    E_P[L - 1] = 0, and E_P[(L - 1)^2] = e^(D_2(R | P)) - 1. The other two: M >= (1 - q) P, and f is convex. Below
    order 2, x = q (L - 1): (1 + x)^a <= 1 + a x + x^a for x >= 0, and Taylor's remainder for -q <= x < 0, where
    x^2 <= q^2.
    """
    if not 0 < sampling_rate <= 1:
        raise AccountingError(f"expected 0 < sampling_rate <= 1, got {sampling_rate}")
    plain = curve(orders)
    if sampling_rate == 1:
        return plain
    added = np.minimum(_expanded(curve, sampling_rate, orders, 1), _below_two(curve, sampling_rate, orders))
    both = np.maximum(added, _removed(curve, sampling_rate, orders))
    return np.minimum(plain, np.minimum(both, _expanded(curve, sampling_rate, orders, 3)))


def _expanded(curve: Curve, sampling_rate: float, orders: Orders, factor: int) -> NDArray[np.float64]:
    """Return the binomial expansion at whole orders, its terms from l = 3 on times ``factor``, and its chords."""
    whole = np.unique(np.concatenate([np.floor(orders), np.ceil(orders), [2.0]]))
    whole = whole[whole >= 2]
    terms = np.arange(2.0, whole.max() + 1)  # l
    # (orders, l): what does not exist has weight 0.
    binomials = gammaln(whole[:, None] + 1) - gammaln(terms + 1) - gammaln(np.maximum(whole[:, None] - terms, 0) + 1)
    logs = binomials + (whole[:, None] - terms) * math.log1p(-sampling_rate) + terms * math.log(sampling_rate)
    logs += np.where(terms >= 3, math.log(factor), 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        logs = np.where(terms <= whole[:, None], logs + (terms - 1) * curve(terms), -np.inf)
    first = (whole - 1) * math.log1p(-sampling_rate) + np.log1p((whole - 1) * sampling_rate)  # l = 0 and 1
    moments = np.maximum(0.0, logsumexp(np.column_stack([first, logs]), axis=1))  # (a - 1) D_a
    chord = np.interp(orders, np.concatenate([[1.0], whole]), np.concatenate([[0.0], moments]))
    return np.asarray(chord / (orders - 1))


def _below_two(curve: Curve, sampling_rate: float, orders: Orders) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        large = np.exp(orders * math.log(sampling_rate) + (orders - 1) * curve(orders))
    small = orders * (orders - 1) / 2 * (1 - sampling_rate) ** (orders - 2) * sampling_rate**2
    return np.where(orders < 2, np.log1p(large + small) / (orders - 1), np.inf)


def _removed(curve: Curve, sampling_rate: float, orders: Orders) -> NDArray[np.float64]:
    power = orders - 1
    with np.errstate(over="ignore", invalid="ignore"):
        remainder = np.expm1(-power * math.log1p(-sampling_rate)) - power * sampling_rate
        quadratic = np.log1p(remainder * np.expm1(curve(np.array([2.0]))))
        mean = np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + power * curve(orders))
    quadratic = np.nan_to_num(quadratic, nan=np.inf, posinf=np.inf)
    return np.asarray(np.minimum(np.minimum(quadratic, mean) / power, -math.log1p(-sampling_rate)))
