import math

import pytest
from opacus.accountants import RDPAccountant
from scipy import optimize, stats

from common import accounting
from common.accounting import AccountantName, Charge, calibrate_noise_multiplier, epsilon_of, merged
from common.errors import AccountingError

ACCOUNTANTS: tuple[AccountantName, ...] = ("rdp", "prv")


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Return the exact epsilon of one Gaussian release (Balle and Wang 2018, Theorem 8)."""

    def gap(epsilon: float) -> float:
        a, b = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
        return stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b) - delta

    return optimize.brentq(gap, 0, 200)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("noise_multiplier", [0.8, 2.0, 5.0])
def test_one_full_batch_step_is_the_gaussian_mechanism(accountant: AccountantName, noise_multiplier: float) -> None:
    exact = gaussian_epsilon(noise_multiplier, 1e-5)
    found = epsilon_of([Charge(noise_multiplier, 1.0, 1)], 1e-5, accountant)
    assert exact * 0.999 <= found <= exact * 1.2 + 0.02


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_monotone(accountant: AccountantName) -> None:
    def cost(z: float = 1.0, q: float = 0.1, steps: int = 100) -> float:
        return epsilon_of([Charge(z, q, steps)], 1e-5, accountant)

    assert cost(z=0.8) > cost() > cost(z=1.5)
    assert cost(q=0.2) > cost() > cost(q=0.05)
    assert cost(steps=200) > cost() > cost(steps=50)


def test_rdp_agrees_with_opacus() -> None:
    opacus = RDPAccountant()
    opacus.history = [(1.2, 0.1, 200)]
    ours = epsilon_of([Charge(1.2, 0.1, 200)], 1e-5)
    assert ours == pytest.approx(opacus.get_epsilon(1e-5), rel=1e-3)
    assert ours <= opacus.get_epsilon(1e-5) * (1 + 1e-9)  # more orders can only help


def test_prv_is_tighter_than_rdp() -> None:
    history = [Charge(1.2, 0.1, 200)]
    assert epsilon_of(history, 1e-5, "prv") < epsilon_of(history, 1e-5, "rdp")


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_split_runs_equal_one_run_and_order_does_not_matter(accountant: AccountantName) -> None:
    whole = epsilon_of([Charge(1.0, 0.1, 50), Charge(2.0, 0.2, 10)], 1e-5, accountant)
    parts = epsilon_of([Charge(2.0, 0.2, 4), Charge(1.0, 0.1, 50), Charge(2.0, 0.2, 6)], 1e-5, accountant)
    assert parts == whole
    assert whole > epsilon_of([Charge(1.0, 0.1, 50)], 1e-5, accountant)


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("sampling_rate", [0.01, 0.1, 1.0])
def test_calibration_never_overshoots_and_wastes_little(epsilon: float, sampling_rate: float) -> None:
    z = calibrate_noise_multiplier(epsilon=epsilon, delta=1e-5, sampling_rate=sampling_rate, steps=200)
    assert epsilon * 0.99 <= epsilon_of([Charge(z, sampling_rate, 200)], 1e-5) <= epsilon


def test_calibration_with_prv_needs_less_noise() -> None:
    settings = {"epsilon": 3.0, "delta": 1e-5, "sampling_rate": 0.1, "steps": 100}
    z = calibrate_noise_multiplier(**settings, accountant="prv")
    assert z < calibrate_noise_multiplier(**settings)
    assert epsilon_of([Charge(z, 0.1, 100)], 1e-5, "prv") <= 3.0


def test_nothing_costs_nothing() -> None:
    for accountant in ACCOUNTANTS:
        assert epsilon_of([], 1e-5, accountant) == 0.0


def test_the_same_history_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [Charge(1.234, 0.077, 11)]
    first = epsilon_of(history, 1e-5)
    monkeypatch.setitem(accounting._ACCOUNTANTS, "rdp", None)  # any further computation would now fail
    assert epsilon_of([Charge(1.234, 0.077, 5), Charge(1.234, 0.077, 6)], 1e-5) == first


def test_asking_changes_nothing() -> None:
    history = (Charge(1.0, 0.1, 10),)
    assert [epsilon_of(history, 1e-5) for _ in range(3)] == [epsilon_of(history, 1e-5)] * 3
    assert merged(history) == history


def test_bad_input_is_named() -> None:
    with pytest.raises(AccountingError, match="no noise, no privacy"):
        Charge(0.0, 0.1, 1)
    with pytest.raises(AccountingError, match="sampling_rate"):
        Charge(1.0, 0.0, 1)
    with pytest.raises(AccountingError, match="delta=0"):
        epsilon_of([], 0)
    with pytest.raises(AccountingError, match="unknown accountant 'moments'"):
        epsilon_of([], 1e-5, "moments")  # type: ignore[arg-type]
    with pytest.raises(AccountingError, match="epsilon=0"):
        calibrate_noise_multiplier(epsilon=0, delta=1e-5, sampling_rate=0.1, steps=1)
    with pytest.raises(AccountingError, match="no noise multiplier"):
        calibrate_noise_multiplier(epsilon=1e-7, delta=1e-12, sampling_rate=1.0, steps=10**6)
