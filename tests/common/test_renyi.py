"""Renyi curves: equal to exact divergences where those are known, never below them anywhere."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.accounting import _RDP_ORDERS, _rdp_of_one_step
from common.errors import AccountingError
from common.renyi import (
    added,
    exponential_curve,
    gaussian_curve,
    laplace_curve,
    pure_curve,
    sampled,
    sampled_pure_epsilon,
)

ORDERS = np.array(_RDP_ORDERS)


def _divergences(upper: np.ndarray, lower: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Return the Renyi divergences of two discrete distributions without zeros, from the definition."""
    logs = np.log(upper)[None] * orders[:, None] + np.log(lower)[None] * (1 - orders[:, None])
    top = logs.max(1, keepdims=True)
    return (top[:, 0] + np.log(np.exp(logs - top).sum(1))) / (orders - 1)


def _pairs(strategy_size: int = 5) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    weights = st.lists(st.floats(-4, 4), min_size=strategy_size, max_size=strategy_size)
    return st.tuples(weights, weights).map(lambda pair: tuple(np.exp(w) / np.exp(w).sum() for w in pair))


@settings(deadline=None, max_examples=150)
@given(_pairs(), st.floats(1e-4, 0.999))
def test_sampling_is_never_below_the_exact_divergence(pair: tuple[np.ndarray, np.ndarray], rate: float) -> None:
    without, with_record = pair

    def curve(orders: np.ndarray) -> np.ndarray:
        return np.maximum(_divergences(without, with_record, orders), _divergences(with_record, without, orders))

    orders = np.array([1.1, 1.5, 2, 2.5, 3, 7.3, 16, 40])
    mixture = (1 - rate) * without + rate * with_record
    bound = sampled(curve, rate, orders)
    for exact in (_divergences(mixture, without, orders), _divergences(without, mixture, orders)):
        assert (exact <= bound * (1 + 1e-9) + 1e-12).all()


def test_sampling_a_gaussian_agrees_with_the_analysis_of_the_gaussian_alone() -> None:
    for noise, rate in ((1.0, 0.01), (2.0, 0.1), (0.7, 0.3)):
        ours, exact = sampled(gaussian_curve(noise), rate, ORDERS), _rdp_of_one_step(rate, noise)
        whole = (np.floor(ORDERS) == ORDERS) & (ORDERS <= 32)
        assert (ours[whole] >= exact[whole] * (1 - 1e-6)).all()
        # The price for holding for every mechanism: small where epsilon is read off.
        middle = (ORDERS >= 2) & (ORDERS <= 8)
        assert (ours[middle] <= exact[middle] * 1.35).all()


def test_sampling_everything_nothing_and_infinity() -> None:
    curve = added(gaussian_curve(1.0), pure_curve(0.5))
    assert np.array_equal(sampled(curve, 1.0, ORDERS), curve(ORDERS))
    assert (sampled(curve, 0.3, ORDERS) <= curve(ORDERS)).all()
    assert (sampled(pure_curve(0.0), 0.2, ORDERS) < 1e-12).all()  # a mechanism that says nothing stays free
    assert np.isinf(sampled(lambda orders: np.full(orders.size, np.inf), 0.2, ORDERS)).all()
    with pytest.raises(AccountingError, match="sampling_rate"):
        sampled(curve, 0.0, ORDERS)


def test_bounded_range_covers_the_exponential_mechanism() -> None:
    rng = np.random.default_rng(0)
    epsilon, orders = 1.3, np.array([1.5, 2.0, 8.0, 100.0])
    for _ in range(300):
        utilities, moved = rng.uniform(0, 3, 6), rng.uniform(-1, 1, 6)  # sensitivity 1
        first, second = (np.exp(epsilon * u / 2) for u in (utilities, utilities + moved))
        exact = _divergences(first / first.sum(), second / second.sum(), orders)
        assert (exact <= exponential_curve(epsilon, 1)(orders) + 1e-12).all()
    assert np.allclose(exponential_curve(epsilon, 7)(orders), 7 * exponential_curve(epsilon, 1)(orders))


def test_pure_and_laplace_curves() -> None:
    for epsilon in (0.1, 1.0, 5.0):
        answer = np.array([1, math.exp(epsilon)]) / (1 + math.exp(epsilon))
        assert np.allclose(pure_curve(epsilon)(ORDERS), _divergences(answer, answer[::-1], ORDERS))
        assert (laplace_curve(epsilon)(ORDERS) <= pure_curve(epsilon)(ORDERS) + 1e-12).all()
        assert (pure_curve(epsilon)(ORDERS) <= epsilon + 1e-12).all()
        assert np.allclose(pure_curve(epsilon, 3)(ORDERS), 3 * pure_curve(epsilon)(ORDERS))
    # Laplace: against a sum over a fine grid, for a shift of one coordinate and for the same L1 shift shared by two.
    grid = np.linspace(-60, 60, 240_001)

    def divergence(shift: float, order: float) -> float:
        log_moment = np.exp(-order * np.abs(grid) - (1 - order) * np.abs(grid - shift)) / 2
        return float(np.log(log_moment.sum() * (grid[1] - grid[0])) / (order - 1))

    for order in (1.5, 2.0, 5.0):
        curve = float(laplace_curve(1.2)(np.array([order]))[0])
        assert curve == pytest.approx(divergence(1.2, order), rel=1e-4)
        assert divergence(0.5, order) + divergence(0.7, order) < curve


def test_pure_epsilon_under_sampling() -> None:
    assert sampled_pure_epsilon(0.8, 1.0) == 0.8
    assert sampled_pure_epsilon(0.8, 0.1) == pytest.approx(math.log(1 + 0.1 * (math.exp(0.8) - 1)))
    assert sampled_pure_epsilon(2000.0, 0.5) == pytest.approx(2000 + math.log(0.5))
