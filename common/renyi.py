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
    Source: Mironov (2017, arXiv:1702.07476).
    """
    return lambda orders: orders / (2 * noise_multiplier**2)


def zcdp_curve(rho: float) -> Curve:
    """Return the curve of a ``rho``-zCDP mechanism: rho * a. Source: Bun and Steinke (2016, arXiv:1605.02065)."""
    return lambda orders: rho * orders


def exponential_rho(pick_epsilon: float, picks: int) -> float:
    """Return rho of ``picks`` adaptive picks of the exponential mechanism of range ``pick_epsilon`` each.

    Computes: picks * pick_epsilon^2 / 8.
    Guarantees: the loss f = log(R / P) lies in an interval of length pick_epsilon. K(a) = log E_P[e^(a f)] is 0 at 0
    and at 1, and K'' is the variance of f under a tilted P, at most pick_epsilon^2 / 4. So K(a) <= a (a - 1)
    pick_epsilon^2 / 8, and D_a(R | P) = K(a) / (a - 1). Picks add up.
    Source: Cesar and Rogers, "Bounding, concentrating, and truncating" (2021, arXiv:2004.07223).
    """
    return picks * pick_epsilon**2 / 8


def sparse_vector_rho(pick_epsilon: float, picks: int) -> float:
    """Return rho of a sparse vector search that stops after ``picks``, each of them ``pick_epsilon``-DP.

    Computes: picks * pick_epsilon^2 / 2.
    Guarantees: the loss of an epsilon-DP mechanism lies in [-epsilon, epsilon]: that is range 2 epsilon, above.
    Source: Bun and Steinke (2016, arXiv:1605.02065).
    """
    return picks * pick_epsilon**2 / 2


def pure_curve(epsilon: float) -> Curve:
    """Return the curve of an ``epsilon``-DP mechanism, such as Laplace noise on a vector of L1 sensitivity 1 / scale.

    Computes: log((e^(a eps) + e^((1 - a) eps)) / (1 + e^eps)) / (a - 1), that of randomised response.
    Guarantees: none is worse. L = R / P lies in [e^-eps, e^eps] and E_P[L] = 1; L^a is convex, so that its mean is
    largest where L takes these two values alone, which is randomised response.
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

    Computes: the larger one of ``_adding`` and ``_removing`` a record, which hold the two proofs, and never more than
    the curve itself. There e(a) is the mechanism's curve, P its output without and R with the record in the sample, the
    rest of the sample being the same; M = (1 - q) P + q R, what comes out where the record is there to be sampled; and
    L = R / P, so that M / P = 1 + q (L - 1) and E_P[L] = 1. What is known of L is the curve, in both directions:
    E_P[L^a] and E_P[L^(1 - a)] are at most e^((a - 1) e(a)).
    Guarantees: an upper bound on D_a(M | P) and on D_a(P | M). The rest of the sample is averaged over, under which the
    divergence does not grow (e^((a - 1) D_a) is jointly convex). Nothing is charged for a mechanism that says nothing.
    Edge cases: q = 1 is the mechanism itself. Infinite stays infinite.
    """
    if not 0 < sampling_rate <= 1:
        raise AccountingError(f"expected 0 < sampling_rate <= 1, got {sampling_rate}")
    plain = curve(orders)
    if sampling_rate == 1:
        return plain
    both = np.maximum(_adding(curve, sampling_rate, orders), _removing(curve, sampling_rate, orders))
    return np.minimum(plain, both)


def _adding(curve: Curve, sampling_rate: float, orders: Orders) -> NDArray[np.float64]:
    """Return a bound on D_a(M | P), from the moment E_P[(1 + q (L - 1))^a].

    Computes the smaller one of ``_expanded`` and, for a < 2, log(1 + q^a e^((a - 1) e(a)) + a (a - 1) / 2 (1 - q)^(a -
    2) q^2) / (a - 1), which is far smaller where the mechanism alone gives much away.
    Guarantees, for the latter, with x = q (L - 1) >= -q: where x >= 0, (1 + x)^a <= 1 + a x + x^a, as (1 + x)^(a - 1)
    <= 1 + x^(a - 1) shows when both are integrated; and x <= q L. Where x < 0, Taylor's remainder a (a - 1) / 2 (1 +
    y)^(a - 2) x^2 has y >= -q and x^2 <= q^2. E_P[x] = 0.
    """
    with np.errstate(over="ignore"):
        large = np.exp(orders * math.log(sampling_rate) + (orders - 1) * curve(orders))
    small = orders * (orders - 1) / 2 * (1 - sampling_rate) ** (orders - 2) * sampling_rate**2
    below_two = np.where(orders < 2, np.log1p(large + small) / (orders - 1), np.inf)
    return np.minimum(_expanded(curve, sampling_rate, orders), below_two)


def _expanded(curve: Curve, sampling_rate: float, orders: Orders) -> NDArray[np.float64]:
    """Return a bound on D_a(M | P) by the binomial theorem.

    Computes: at whole a, log(sum over l of C(a, l) (1 - q)^(a - l) q^l e^((l - 1) e(l))) / (a - 1), where the terms of
    l = 0 and 1 are exact: E_P[L^l] is 1. Between whole orders the chord of (a - 1) D_a, which is convex in a, as the
    logarithm of a moment, and 0 at a = 1.
    Source: for Gaussian noise Mironov, Talwar and Zhang (2019, arXiv:1908.10530), where it is exact.
    """
    whole = np.unique(np.concatenate([np.floor(orders), np.ceil(orders), [2.0]]))
    whole = whole[whole >= 2]
    terms = np.arange(2.0, whole.max() + 1)  # l
    # (orders, l): what does not exist has weight 0.
    binomials = gammaln(whole[:, None] + 1) - gammaln(terms + 1) - gammaln(np.maximum(whole[:, None] - terms, 0) + 1)
    logs = binomials + (whole[:, None] - terms) * math.log1p(-sampling_rate) + terms * math.log(sampling_rate)
    with np.errstate(over="ignore", invalid="ignore"):
        logs = np.where(terms <= whole[:, None], logs + (terms - 1) * curve(terms), -np.inf)
    first = (whole - 1) * math.log1p(-sampling_rate) + np.log1p((whole - 1) * sampling_rate)  # l = 0 and 1
    moments = np.maximum(0.0, logsumexp(np.column_stack([first, logs]), axis=1))  # (a - 1) D_a
    chord = np.interp(orders, np.concatenate([[1.0], whole]), np.concatenate([[0.0], moments]))
    return np.asarray(chord / (orders - 1))


def _removing(curve: Curve, sampling_rate: float, orders: Orders) -> NDArray[np.float64]:
    """Return a bound on D_a(P | M), from the moment E_P[f(x)] with f(x) = (1 + x)^(1 - a) and x = q (L - 1) >= -q.

    Computes log(1 + the smallest of these) / (a - 1), with V = e^(e(2)) - 1 and W = e^((a - 1) e(a)) - 1; and never
    more than -log(1 - q), because M >= (1 - q) P:
    - steep:        ((1 - q)^(1 - a) - 1 - (a - 1) q) V
    - interpolated: (1 - q) q^2 a (a - 1) / 2 V + q^3 W
    - mean:         q W
    Guarantees: write f(x) = 1 + (1 - a) x + x^2 h(x). By Taylor's theorem with the remainder as an integral, h(x) is
    the integral of (1 - t) f''(t x) over t from 0 to 1, where f''(y) = a (a - 1) (1 + y)^(-a - 1) falls and is convex;
    so does h, and so is h. Since E_P[x] = 0, the moment is 1 + E_P[x^2 h(x)], and E_P[(L - 1)^2] = E_P[L^2] - 1 <= V.
    - steep: h is largest at the smallest x there can be, -q; and q^2 h(-q) is the factor of V.
    - interpolated: x is the mean of 0 and L - 1 with weights 1 - q and q, and h is convex: h(x) <= (1 - q) h(0) + q
      h(L - 1), with h(0) = a (a - 1) / 2 and (L - 1)^2 h(L - 1) = L^(1 - a) - 1 - (1 - a) (L - 1), of mean at most W.
    - mean: f itself is convex in the same way: f(x) <= (1 - q) + q L^(1 - a).
    Source: ours; tests/common/test_renyi.py lets a linear program search for a mechanism that passes it.
    """
    power = orders - 1
    log_rest = math.log1p(-sampling_rate)
    with np.errstate(over="ignore", invalid="ignore"):
        # Not below 0, where rounding may bring the curve of a mechanism that says nothing.
        at_two, at_order = (np.maximum(0.0, np.expm1((at - 1) * curve(at))) for at in (np.array([2.0]), orders))
        steep = (np.expm1(-power * log_rest) - power * sampling_rate) * at_two
        flat = (1 - sampling_rate) * sampling_rate**2 * orders * power / 2 * at_two
        interpolated = flat + sampling_rate**3 * at_order
        smallest = np.minimum(np.minimum(_or_infinite(steep), _or_infinite(interpolated)), sampling_rate * at_order)
    return np.minimum(np.log1p(smallest) / power, -log_rest)


def _or_infinite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``values`` with inf for nan: 0 * inf bounds nothing."""
    return np.nan_to_num(values, nan=np.inf, posinf=np.inf)
