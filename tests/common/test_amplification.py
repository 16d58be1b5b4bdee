"""Charges that are not the sampled Gaussian mechanism alone."""

import math

import numpy as np
import pytest

from common import accountants
from common.accountants import AccountantName, pure_epsilon_of
from common.accounting import calibrate, epsilon_of
from common.charges import Charge, Mechanism, merged
from common.errors import AccountingError
from common.renyi import gaussian_curve, sampled

DELTA = 1e-5
ORDERS = np.array(accountants._RDP_ORDERS)


def test_without_sampling_the_curve_is_the_sum_of_its_parts() -> None:
    curve = accountants._rdp_of_one_step(Mechanism(2.0, 1.0, 0.1, 0.5))
    pure = accountants._rdp_of_one_step(Mechanism(math.inf, 1.0, 0.0, 0.5))
    assert curve == pytest.approx(ORDERS / 8 + 0.1 * ORDERS + pure)
    assert (pure <= np.minimum(0.5, ORDERS / 8) + 1e-12).all() and pure[-1] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_the_general_amplification_is_no_lower_than_the_exact_one_of_the_gaussian(rate: float) -> None:
    """The sampled Gaussian's own curve is known exactly: a bound for any mechanism must lie on or above it."""
    exact = accountants._rdp_of_one_step(Mechanism(2.0, rate))
    general = sampled(gaussian_curve(2.0), rate, ORDERS)
    plain = ORDERS / (2 * 2.0**2)
    assert (general >= exact * (1 - 1e-6)).all() and (general <= plain).all()
    assert general[np.searchsorted(ORDERS, 2)] == pytest.approx(exact[np.searchsorted(ORDERS, 2)], rel=1e-6)  # tight
    assert (general[:20] < 0.9 * plain[:20]).all()  # it does amplify


def test_pure_mechanisms_add_up_and_sampling_amplifies_them() -> None:
    history = [Charge(math.inf, 0.1, 20, pure_epsilon=0.05)]
    exactly = 20 * math.log(1 + 0.1 * (math.e**0.05 - 1))
    assert pure_epsilon_of(history) == pytest.approx(exactly)
    assert epsilon_of(history, DELTA) <= exactly + 1e-12
    many = [Charge(math.inf, 1.0, 10_000, pure_epsilon=0.01)]
    assert epsilon_of(many, DELTA) < 0.1 * pure_epsilon_of(many)  # over many steps the Renyi curve is far tighter
    with_noise = epsilon_of([*history, Charge(1.0, 0.1, 10)], DELTA)
    assert with_noise > max(epsilon_of([Charge(1.0, 0.1, 10)], DELTA), exactly)


def test_a_selection_beside_the_noise_costs_more_and_merges_by_mechanism() -> None:
    plain, selected = Charge(2.0, 0.1, 10), Charge(2.0, 0.1, 10, selection_rho=0.02)
    assert epsilon_of([selected], DELTA) > epsilon_of([plain], DELTA)
    assert epsilon_of([Charge(2.0, 0.1, 10, selection_rho=1e-9)], DELTA) >= epsilon_of([plain], DELTA)
    assert merged([selected, plain, selected]) == (plain, Charge(2.0, 0.1, 20, selection_rho=0.02))
    assert Charge(*selected.to_json()) == selected and len(plain.to_json()) == 3


@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_accountants_that_know_the_gaussian_alone_say_so(accountant: AccountantName) -> None:
    with pytest.raises(AccountingError, match="set 'accountant' to rdp"):
        epsilon_of([Charge(2.0, 0.1, 10, selection_rho=0.1)], DELTA, accountant)


@pytest.mark.parametrize(
    "numbers", [(math.inf, 0.1, 1), (0.0, 0.1, 1, 0.0, 1.0), (1.0, 0.1, 1, -0.1), (1.0, 0.1, 1, 0.0, math.nan)]
)
def test_impossible_charges_are_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(AccountingError):
        Charge(*numbers)  # type: ignore[arg-type]


def test_calibration_of_many_mechanisms_never_overshoots_and_is_close() -> None:
    def history(z: float) -> list[Charge]:
        return [Charge(math.inf, 0.1, steps, pure_epsilon=1 / (z * steps)) for steps in (10, 20)]

    for epsilon in (0.05, 1.0):
        z = calibrate(history, epsilon=epsilon, delta=DELTA)
        assert epsilon_of(history(z), DELTA) <= epsilon < epsilon_of(history(z * (1 - 3e-4)), DELTA)
