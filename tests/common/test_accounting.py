import importlib.util
import math
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy import stats

from common import accountants, accounting
from common.accountants import AccountantName, rdp_to_epsilon
from common.accounting import calibrate_noise_multiplier, epsilon_of, epsilons_of
from common.charges import NEIGHBOURS, PRIVACY_UNIT, Charge, History, Mechanism, merged, neighbours_of
from common.errors import AccountingError

DELTA = 1e-5
needs_pld = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None, reason="needs the extra 'pld' (dp-accounting)"
)
# The conformance suite: what any accountant must fulfil, run against each.
every_accountant = pytest.mark.parametrize("accountant", ["rdp", "prv", pytest.param("pld", marks=needs_pld)])
# How far epsilon may lie above the truth: Opacus' PRV adds 0.01 to be safe, the others only round.
SLACK: dict[AccountantName, float] = {"rdp": 1e-9, "prv": 0.02, "pld": 1e-3}


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Return the exact epsilon of one Gaussian release (Balle and Wang 2018, Theorem 8), by bisection."""

    def delta_at(epsilon: float) -> float:
        a, b = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
        return float(stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b))

    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


@every_accountant
@pytest.mark.parametrize("noise_multiplier", [0.8, 2.0, 5.0])
def test_one_full_batch_step_is_the_gaussian_mechanism(accountant: AccountantName, noise_multiplier: float) -> None:
    exact = gaussian_epsilon(noise_multiplier, DELTA)
    found = epsilon_of([Charge(noise_multiplier, 1.0, 1)], DELTA, accountant)
    assert exact * 0.999 <= found <= exact * 1.1  # below would be a promise that is not kept


@every_accountant
def test_full_batch_steps_are_one_step_with_less_noise(accountant: AccountantName) -> None:
    many = epsilon_of([Charge(8.0, 1.0, 16)], DELTA, accountant)
    assert many == pytest.approx(epsilon_of([Charge(2.0, 1.0, 1)], DELTA, accountant), abs=SLACK[accountant])
    assert many >= gaussian_epsilon(2.0, DELTA) * 0.999


@every_accountant
@pytest.mark.parametrize(
    "charges",
    [
        [Charge(z, 0.1, 40) for z in (4.0, 3.0, 2.0)],
        [Charge(2.0, q, 40) for q in (0.05, 0.1, 0.2, 1.0)],
        [Charge(2.0, 0.1, steps) for steps in (1, 10, 40)],
    ],
    ids=["falls in z", "rises in q", "rises in steps"],
)
def test_monotone(accountant: AccountantName, charges: list[Charge]) -> None:
    costs = epsilons_of([[charge] for charge in charges], DELTA, accountant)
    assert all(less < more for less, more in pairwise(costs))
    assert costs[0] > 0


@every_accountant
def test_split_runs_equal_one_run_and_order_does_not_matter(accountant: AccountantName) -> None:
    whole = epsilon_of([Charge(2.0, 0.1, 50), Charge(3.0, 0.2, 10)], DELTA, accountant)
    parts = [Charge(3.0, 0.2, 4), Charge(2.0, 0.1, 50), Charge(1.0, 0.5, 0), Charge(3.0, 0.2, 6)]
    assert epsilon_of(parts, DELTA, accountant) == whole
    assert epsilon_of(parts[::-1], DELTA, accountant) == whole


@every_accountant
def test_different_mechanisms_compose(accountant: AccountantName) -> None:
    a, b = [Charge(2.0, 0.1, 50)], [Charge(4.0, 0.3, 10)]
    both = epsilon_of(a + b, DELTA, accountant)
    assert both > max(epsilons_of([a, b], DELTA, accountant))
    # Basic composition adds the deltas up, so that each part gets half of it.
    assert both <= sum(epsilons_of([a, b], DELTA / 2, accountant))


@every_accountant
@pytest.mark.parametrize(("epsilon", "sampling_rate"), [(0.5, 0.1), (3.0, 1.0)])
def test_calibration_never_overshoots_and_wastes_little(
    accountant: AccountantName, epsilon: float, sampling_rate: float
) -> None:
    z = calibrate_noise_multiplier(
        epsilon=epsilon, delta=DELTA, sampling_rate=sampling_rate, steps=10, accountant=accountant
    )
    assert epsilon * 0.99 <= epsilon_of([Charge(z, sampling_rate, 10)], DELTA, accountant) <= epsilon


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("sampling_rate", [0.01, 0.1, 1.0])
def test_calibration_with_rdp_over_a_wide_grid(epsilon: float, sampling_rate: float) -> None:
    z = calibrate_noise_multiplier(epsilon=epsilon, delta=DELTA, sampling_rate=sampling_rate, steps=200)
    assert epsilon * 0.99 <= epsilon_of([Charge(z, sampling_rate, 200)], DELTA) <= epsilon


@every_accountant
def test_nothing_costs_nothing(accountant: AccountantName) -> None:
    assert epsilon_of([], DELTA, accountant) == 0.0
    assert epsilons_of([], DELTA, accountant) == []
    assert epsilons_of([[], [Charge(2.0, 1.0, 0)]], DELTA, accountant) == [0.0, 0.0]


@needs_pld
@pytest.mark.parametrize(
    "history",
    [
        [Charge(1.2, 0.1, 200)],
        [Charge(2.0, 0.1, 200)],
        [Charge(1.0, 0.01, 1000)],
        [Charge(2.0, 0.1, 50), Charge(3.0, 0.3, 10)],
    ],
)
def test_the_tighter_accountants_agree_and_are_below_rdp(history: list[Charge]) -> None:
    rdp, prv, pld = (epsilon_of(history, DELTA, accountant) for accountant in ("rdp", "prv", "pld"))
    assert pld <= rdp * (1 + 1e-6)
    assert prv == pytest.approx(pld, rel=0.02)
    assert prv < rdp


@needs_pld
def test_pld_stays_below_rdp_where_a_coarse_grid_would_not() -> None:
    history = [Charge(2.0, 0.001, 10_000)]
    assert epsilon_of(history, DELTA, "pld") <= epsilon_of(history, DELTA, "rdp") * (1 + 1e-6)


@pytest.mark.parametrize(
    "history",
    [
        [Charge(1.2, 0.1, 200)],
        [Charge(0.7, 0.01, 1000)],
        [Charge(3.0, 1.0, 20)],
        [Charge(1.0, 0.02, 300), Charge(2.0, 0.1, 50), Charge(5.0, 0.5, 10)],
    ],
)
def test_rdp_agrees_with_opacus_at_equal_orders(history: list[Charge]) -> None:
    opacus = RDPAccountant()
    opacus.history = [(c.noise_multiplier, c.sampling_rate, c.steps) for c in history]
    at_equal_orders = opacus.get_epsilon(DELTA, alphas=list(accountants._RDP_ORDERS))
    assert epsilon_of(history, DELTA) == pytest.approx(at_equal_orders, rel=1e-3)
    assert epsilon_of(history, DELTA) <= opacus.get_epsilon(DELTA) * (1 + 1e-9)  # more orders can only help


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_the_conversion_is_that_of_opacus(delta: float) -> None:
    generator = np.random.default_rng(1)
    orders = np.array(accountants._RDP_ORDERS)
    rdp = orders * generator.lognormal(-3, 2, (200, 1)) + generator.uniform(0, 0.1, (200, len(orders)))
    rdp[generator.random(rdp.shape) < 0.1] = np.inf
    ours = rdp_to_epsilon(rdp, orders, delta)
    assert ours == pytest.approx([opacus_epsilon(row, delta) for row in rdp], rel=1e-12)


def test_orders_that_prove_nothing_do_not_win() -> None:
    orders = np.array([2.0, 3.0])
    one, none = rdp_to_epsilon(np.array([[1.0, np.inf], [np.inf, np.inf]]), orders, DELTA)
    assert one == pytest.approx(1.0 + math.log(1 / 2) - math.log(2 * DELTA))
    assert none == math.inf


def test_many_sites_at_once_are_what_each_is_alone() -> None:
    histories = [
        [Charge(2.0, 0.1, 10)],
        [Charge(1.0, 0.5, 3), Charge(2.0, 0.1, 7)],
        [],
        [Charge(3.0, 0.2, 5), Charge(2.0, 0.1, 10)],
        [Charge(2.0, 0.1, 4), Charge(2.0, 0.1, 6)],
    ]
    assert epsilons_of(histories, DELTA) == [epsilon_of(history, DELTA) for history in histories]


def test_an_infinite_curve_does_not_reach_the_sites_that_never_ran_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def curve(mechanism: Mechanism) -> np.ndarray:
        orders = np.array(accountants._RDP_ORDERS)
        return orders / 8 if mechanism.noise_multiplier == 2.0 else np.full(orders.shape, np.inf)

    alone = epsilon_of([Charge(2.0, 1.0, 10)], DELTA)
    monkeypatch.setattr(accountants, "_rdp_of_one_step", curve)
    assert epsilons_of([[Charge(2.0, 1.0, 10)], [Charge(1.0, 1.0, 1)]], DELTA) == [pytest.approx(alone), math.inf]


def test_many_sites_are_fast() -> None:
    curves = [accountants._rdp_of_one_step(Mechanism(z, q)) for z, q in MECHANISMS]
    histories = [
        [Charge(z, q, 1 + site * (place + 1)) for place, (z, q) in enumerate(MECHANISMS)] for site in range(2000)
    ]
    rdp = np.array([sum(c.steps * curve for c, curve in zip(h, curves, strict=True)) for h in histories])
    orders = np.array(accountants._RDP_ORDERS)

    one_by_one = seconds(lambda: [opacus_epsilon(row, DELTA) for row in rdp])
    assert seconds(lambda: rdp_to_epsilon(rdp, orders, DELTA)) < one_by_one / 10
    assert seconds(lambda: epsilons_of(histories, DELTA)) < one_by_one  # and that with the sums of all the charges
    assert epsilons_of(histories, DELTA) == pytest.approx([opacus_epsilon(row, DELTA) for row in rdp], rel=1e-9)


MECHANISMS = ((1.0, 0.1), (1.5, 0.05), (2.0, 0.2))


def seconds(work: Callable[[], object]) -> float:
    """Return the least CPU time of five: what the work takes, whatever else the machine does."""
    times = []
    for _ in range(5):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def opacus_epsilon(rdp: np.ndarray, delta: float) -> float:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is")
        epsilon, _order = opacus_rdp.get_privacy_spent(orders=accountants._RDP_ORDERS, rdp=rdp, delta=delta)
    return max(0.0, float(epsilon))


def test_the_same_history_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [Charge(1.234, 0.077, 11)]
    first = epsilon_of(history, DELTA)
    monkeypatch.setitem(accounting._ACCOUNTANTS, "rdp", None)  # any further computation would now fail
    assert epsilon_of([Charge(1.234, 0.077, 5), Charge(1.234, 0.077, 6)], DELTA) == first


def test_asking_changes_nothing() -> None:
    history = (Charge(1.0, 0.1, 10),)
    assert [epsilon_of(history, DELTA) for _ in range(3)] == [epsilon_of(history, DELTA)] * 3
    assert merged(history) == history


def test_merged_adds_up_sorts_and_drops_what_was_not_run() -> None:
    assert merged([Charge(2.0, 0.1, 1), Charge(1.0, 0.2, 2), Charge(1.0, 0.1, 3), Charge(2.0, 0.1, 4)]) == (
        Charge(1.0, 0.1, 3),
        Charge(1.0, 0.2, 2),
        Charge(2.0, 0.1, 5),
    )
    assert merged([Charge(1.0, 0.1, 0), Charge(2.0, 0.1, 4)]) == (Charge(2.0, 0.1, 4),)
    assert merged(iter([Charge(1.0, 0.1, 1)] * 2)) == (Charge(1.0, 0.1, 2),)


def test_a_failed_computation_is_not_perfect_privacy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def epsilon(self, history: History, delta: float) -> float:
            return math.nan

    monkeypatch.setitem(accounting._ACCOUNTANTS, "prv", Broken())
    with pytest.raises(AccountingError, match=r"nan.*4\.321"):
        epsilon_of([Charge(4.321, 0.1, 1)], DELTA, "prv")


def test_pld_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(AccountingError, match="pip install 'dp-accounting"):
        epsilon_of([Charge(1.357, 0.1, 1)], DELTA, "pld")


def test_the_neighbours_of_a_unit() -> None:
    assert PRIVACY_UNIT == "record" and neighbours_of("record") == NEIGHBOURS == "add or remove one record"
    assert "site" in neighbours_of("client")
    with pytest.raises(AccountingError, match="unknown privacy unit 'user'"):
        neighbours_of("user")  # type: ignore[arg-type]


@pytest.mark.parametrize("z", [0.0, -1.0, math.nan, math.inf])
def test_a_noise_multiplier_that_is_none(z: float) -> None:
    with pytest.raises(AccountingError, match=f"got {z}: no noise, no privacy"):
        Charge(z, 0.1, 1)


@pytest.mark.parametrize("q", [0.0, -0.1, 1.1, math.nan])
def test_a_sampling_rate_that_is_none(q: float) -> None:
    with pytest.raises(AccountingError, match=f"sampling_rate <= 1, got {q}"):
        Charge(1.0, q, 1)


@pytest.mark.parametrize("steps", [-1, math.nan])
def test_steps_that_are_none(steps: int) -> None:
    with pytest.raises(AccountingError, match=f"steps >= 0, got {steps}"):
        Charge(1.0, 0.1, steps)


LEAST, MOST = math.ulp(0.0), sys.float_info.max


@pytest.mark.parametrize(
    ("field", "inside", "outside", "others"),
    [
        ("noise_multiplier", LEAST, 0.0, {}),
        ("noise_multiplier", MOST, math.inf, {}),
        ("noise_multiplier", math.inf, math.nan, {"pure_epsilon": 1.0}),
        ("sampling_rate", LEAST, 0.0, {}),
        ("sampling_rate", 1.0, math.nextafter(1, 2), {}),
        ("steps", 0, -1, {}),
        *((name, 0.0, -LEAST, {}) for name in ("selection_rho", "pure_epsilon")),
        *((name, MOST, math.inf, {}) for name in ("selection_rho", "pure_epsilon")),
        ("selecting_steps", 0, -1, {"selection_rho": 1.0}),
        ("selecting_steps", 5, 6, {"selection_rho": 1.0}),
        ("selecting_steps", 0, 1, {}),
    ],
)
def test_the_last_charge_that_is_allowed_and_the_first_that_is_not(
    field: str, inside: float, outside: float, others: dict[str, float]
) -> None:
    good: dict[str, Any] = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 5, **others}
    assert getattr(Charge(**{**good, field: inside}), field) == inside
    with pytest.raises(AccountingError, match=rf"expected .*{field}.*, got {outside}"):
        Charge(**{**good, field: outside})


def test_deltas_lie_between_0_and_1() -> None:
    for delta in (LEAST, math.nextafter(1, 0)):
        assert epsilon_of([], delta) == 0


def test_as_much_noise_as_is_tried() -> None:
    last = epsilon_of([Charge(2.0**16, 1.0, 10**6)], DELTA)
    assert calibrate_noise_multiplier(epsilon=last, delta=DELTA, sampling_rate=1.0, steps=10**6) == 2**16
    with pytest.raises(AccountingError, match="no noise multiplier up to 100000 meets"):
        calibrate_noise_multiplier(epsilon=last * (1 - 1e-6), delta=DELTA, sampling_rate=1.0, steps=10**6)


@every_accountant
@pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan])
def test_a_delta_that_is_none(accountant: AccountantName, delta: float) -> None:
    with pytest.raises(AccountingError, match=f"got delta={delta}"):
        epsilon_of([], delta, accountant)
    with pytest.raises(AccountingError, match=f"got delta={delta}"):
        epsilons_of([], delta, accountant)


def test_bad_input_is_named() -> None:
    with pytest.raises(AccountingError, match="unknown accountant 'moments'"):
        epsilon_of([], DELTA, "moments")  # type: ignore[arg-type]
    with pytest.raises(AccountingError, match="unknown accountant 'moments'"):
        epsilons_of([], DELTA, "moments")  # type: ignore[arg-type]
    with pytest.raises(AccountingError, match="epsilon=0"):
        calibrate_noise_multiplier(epsilon=0, delta=DELTA, sampling_rate=0.1, steps=1)
    with pytest.raises(AccountingError, match="at least one step to calibrate for, got 0"):
        calibrate_noise_multiplier(epsilon=1, delta=DELTA, sampling_rate=0.1, steps=0)
    with pytest.raises(AccountingError, match="no noise multiplier"):
        calibrate_noise_multiplier(epsilon=1e-7, delta=1e-12, sampling_rate=1.0, steps=10**6)
