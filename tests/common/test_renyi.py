"""Renyi curves: equal to exact divergences where those are known, never below them anywhere."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import linprog

from common.accountants import _RDP_ORDERS, _rdp_of_one_step
from common.accounting import calibrate, epsilon_of
from common.charges import Charge, Mechanism, merged
from common.errors import AccountingError
from common.renyi import (
    Curve,
    _adding,
    _removing,
    added,
    exponential_rho,
    gaussian_curve,
    pure_curve,
    sampled,
    sparse_vector_rho,
    zcdp_curve,
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


CURVES = {
    "little noise": gaussian_curve(1.0),
    "much noise": gaussian_curve(3.0),
    "selection and noise": added(zcdp_curve(0.05), gaussian_curve(2.0)),
    "a pure mechanism": pure_curve(0.5),
    "a pure one that tells much": pure_curve(4.0),
}
KNOWN = np.array([1.1, 1.25, 1.5, 1.75, *range(2, 33)])


def _worst_mechanism(curve: Curve, moment: np.ndarray, ratios: np.ndarray) -> float:
    """Return the largest mean of ``moment`` under a P on which R / P takes ``ratios`` and ``curve`` holds.

    What the linear program finds is a mechanism with that curve, in both directions, at all KNOWN orders.
    """
    logs, most = np.log(ratios), (KNOWN - 1) * curve(KNOWN)
    rows = [sign * (order - 1) * logs + (logs if sign > 0 else 0.0) for order in KNOWN for sign in (1, -1)]
    limits = np.array(rows) - np.repeat(most, 2)[:, None]  # log of L^a, or of L^(1 - a), over what it may be
    possible = (limits < 18).all(0)  # elsewhere P could have no weight worth speaking of
    found = linprog(
        -moment[possible],
        A_ub=np.exp(limits[:, possible]),
        b_ub=np.ones(len(limits)),
        A_eq=np.array([np.ones(possible.sum()), ratios[possible]]),
        b_eq=[1.0, 1.0],
    )
    return float(-found.fun) if found.success else math.nan


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_no_mechanism_with_a_curve_passes_its_bound(curve: Curve) -> None:
    """Not on examples alone: the worst of all mechanisms whose likelihood ratios are on a grid, in each direction."""
    losses = [0.0, 0.5, -0.5, 4.0, -4.0]  # those of the pure mechanisms are on the grid
    ratios = np.exp(np.append(np.linspace(-12, 12, 200), losses))
    reached, tried = 0.0, 0
    for rate in (0.01, 0.1, 0.5, 0.9):
        mixture = 1 + rate * (ratios - 1)
        for order in (1.5, 2.0, 3.0, 6.0, 20.0):
            for bound, moment in ((_adding, mixture**order), (_removing, mixture ** (1 - order))):
                worst = _worst_mechanism(curve, moment, ratios)
                if not math.isnan(worst):  # moments of very different sizes are beyond the solver
                    limit = float(bound(curve, rate, np.array([order]))[0])
                    found = math.log(worst) / (order - 1)
                    assert found <= limit * (1 + 1e-6) + 1e-9, (rate, order, bound.__name__)
                    reached, tried = max(reached, found / limit), tried + 1
    assert tried > 25 and reached > 0.99  # somewhere the bound is what it must be


NOISES = {
    "Gaussian 0.8": (stats.norm(scale=0.8), gaussian_curve(0.8)),
    "Gaussian 4": (stats.norm(scale=4.0), gaussian_curve(4.0)),
    "Laplace 1/2": (stats.laplace(scale=2.0), pure_curve(0.5)),
    "Laplace 3": (stats.laplace(scale=1 / 3), pure_curve(3.0)),
}


@pytest.mark.parametrize(("noise", "curve"), NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("rate", [0.01, 0.2, 0.7])
def test_bounds_hold_for_sampled_noise_by_quadrature(noise: stats.rv_continuous, curve: Curve, rate: float) -> None:
    points, step = np.linspace(-80, 81, 400_001, retstep=True)
    without, with_record = noise.logpdf(points), noise.logpdf(points - 1)
    mixture = np.logaddexp(math.log1p(-rate) + without, math.log(rate) + with_record)
    for order in (1.1, 1.7, 2.0, 3.0, 5.5, 12.0):
        limits = [float(bound(curve, rate, np.array([order]))[0]) for bound in (_adding, _removing)]
        for limit, (upper, lower) in zip(limits, ((mixture, without), (without, mixture)), strict=True):
            exact = math.log(np.exp(order * upper + (1 - order) * lower).sum() * step) / (order - 1)
            assert exact <= limit + 1e-7
        assert max(limits) <= curve(np.array([order]))[0] * 4  # and they are not just large


def test_sampling_a_gaussian_agrees_with_the_analysis_of_the_gaussian_alone() -> None:
    for noise, rate in ((1.0, 0.01), (2.0, 0.1), (0.7, 0.3)):
        ours, exact = sampled(gaussian_curve(noise), rate, ORDERS), _rdp_of_one_step(Mechanism(noise, rate))
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
        assert (exact <= zcdp_curve(exponential_rho(epsilon, 1))(orders) + 1e-12).all()
    assert exponential_rho(epsilon, 7) == pytest.approx(7 * exponential_rho(epsilon, 1))


def test_the_pure_curve_is_that_of_randomised_response() -> None:
    for epsilon in (0.1, 1.0, 5.0):
        answer = np.array([1, math.exp(epsilon)]) / (1 + math.exp(epsilon))
        curve = pure_curve(epsilon)(ORDERS)
        assert np.allclose(curve, _divergences(answer, answer[::-1], ORDERS))
        assert (curve <= np.minimum(epsilon, zcdp_curve(sparse_vector_rho(epsilon, 1))(ORDERS)) + 1e-12).all()


def test_pure_charges_add_up() -> None:
    def pure(epsilon: float, rate: float, steps: int, delta: float = 1e-9) -> float:
        return epsilon_of((Charge(math.inf, rate, steps, pure_epsilon=epsilon),), delta)

    assert pure(0.8, 1.0, 3) == pytest.approx(2.4)
    assert pure(0.8, 0.1, 1) == pytest.approx(math.log(1 + 0.1 * (math.exp(0.8) - 1)))
    assert pure(2000.0, 0.5, 1) == pytest.approx(2000 + math.log(0.5))
    assert pure(0.01, 1.0, 1000) < 5  # many small ones: with a delta less than their sum
    noise = calibrate(lambda z: (Charge(math.inf, 0.3, 50, pure_epsilon=1 / z),), epsilon=2.0, delta=1e-5)
    assert pure(1 / noise, 0.3, 50, delta=1e-5) <= 2.0 < pure(1 / noise, 0.3, 50, delta=1e-6)


def test_a_selection_in_some_steps_costs_less_than_in_all() -> None:
    def cost(*charges: Charge) -> float:
        return epsilon_of(charges, 1e-5)

    once = Charge(2.0, 0.1, 50, selection_rho=0.1, selecting_steps=1)
    assert merged([once]) == merged([Charge(2.0, 0.1, 1, 0.1), Charge(2.0, 0.1, 49)])
    assert cost(Charge(2.0, 0.1, 50)) < cost(once) < cost(Charge(2.0, 0.1, 50, 0.1))
    assert cost(once, once) == cost(Charge(2.0, 0.1, 2, 0.1), Charge(2.0, 0.1, 98))
    assert Charge(*once.to_json()) == once  # type: ignore[arg-type]
    assert Charge(2.0, 0.1, 5, 0.1, selecting_steps=5).parts == (Charge(2.0, 0.1, 5, 0.1),)
    for bad in (6, -1):
        with pytest.raises(AccountingError, match="selecting_steps"):
            Charge(2.0, 0.1, 5, 0.1, selecting_steps=bad)


def test_selection_and_noise_on_one_sample_cost_more_than_either_and_less_than_a_sample_each_unsampled() -> None:
    both = epsilon_of((Charge(2.0, 0.05, 100, selection_rho=0.05),), 1e-5)
    noise = epsilon_of((Charge(2.0, 0.05, 100),), 1e-5)
    unsampled = epsilon_of((Charge(2.0, 1.0, 100, selection_rho=0.05),), 1e-5)
    assert noise < both < unsampled / 5
    # A selection is worth as much as Gaussian noise of the same rho: together they are one Gaussian.
    rho = 1 / (2 * 2.0**2) + 0.05
    as_one = epsilon_of((Charge(math.sqrt(1 / (2 * rho)), 0.05, 100),), 1e-5)
    assert as_one * (1 - 1e-9) <= both <= 1.1 * as_one
