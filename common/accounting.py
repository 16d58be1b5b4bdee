"""What a history of sampled Gaussian steps costs, and how much noise a budget asks for.

Unit of privacy: one record. Neighbouring data sets differ by adding or removing one record. Every step is a Poisson
sample with rate q of the records, of which the clipped sum is released with Gaussian noise of std z * clip_norm.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from common.errors import AccountingError

AccountantName = Literal["rdp", "prv"]
PRIVACY_UNIT = "record"
NEIGHBOURS = "add or remove one record"

# Opacus' own orders, and some above them for small budgets.
_RDP_ORDERS = tuple([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + [80, 96, 128, 192, 256, 384, 512, 1024])


@dataclass(frozen=True, slots=True, order=True)
class Charge:
    """``steps`` releases of the sampled Gaussian mechanism with noise multiplier z and sampling rate q."""

    noise_multiplier: float
    sampling_rate: float
    steps: int

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise AccountingError(f"expected noise_multiplier > 0, got {self.noise_multiplier}: no noise, no privacy")
        if not 0 < self.sampling_rate <= 1:
            raise AccountingError(f"expected 0 < sampling_rate <= 1, got {self.sampling_rate}")
        if self.steps < 0:
            raise AccountingError(f"expected steps >= 0, got {self.steps}")


History = tuple[Charge, ...]


def merged(charges: Iterable[Charge]) -> History:
    """Return the same history with equal mechanisms added up and sorted: one key for one privacy loss."""
    steps: dict[tuple[float, float], int] = {}
    for charge in charges:
        mechanism = (charge.noise_multiplier, charge.sampling_rate)
        steps[mechanism] = steps.get(mechanism, 0) + charge.steps
    return tuple(sorted(Charge(z, q, count) for (z, q), count in steps.items() if count > 0))


class Accountant(Protocol):
    """Turns a history into epsilon at delta: an upper bound, never an estimate."""

    def epsilon(self, history: History, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` of everything in ``history``."""
        ...


class RdpAccountant:
    """Renyi accounting of the sampled Gaussian mechanism (Mironov et al. 2019), on Opacus' analysis."""

    def epsilon(self, history: History, delta: float) -> float:
        """Return min over orders of the conversion of the summed Renyi divergences (Balle et al. 2020)."""
        if not history:
            return 0.0
        rdp = sum(
            (charge.steps * _rdp_of_one_step(charge.sampling_rate, charge.noise_multiplier) for charge in history),
            start=np.zeros(len(_RDP_ORDERS)),
        )
        epsilon, _order = _opacus_rdp().get_privacy_spent(orders=list(_RDP_ORDERS), rdp=rdp, delta=delta)
        return max(0.0, float(epsilon))


class PrvAccountant:
    """Privacy random variables (Gopi et al. 2021), by Opacus: tighter than Renyi, slower."""

    def epsilon(self, history: History, delta: float) -> float:
        """Return the upper end of the PRV accountant's interval."""
        if not history:
            return 0.0
        from opacus.accountants import PRVAccountant  # imports torch: only where it is asked for

        accountant = PRVAccountant()
        accountant.history = [(c.noise_multiplier, c.sampling_rate, c.steps) for c in history]
        with np.errstate(divide="ignore"):  # log(1 - q) is -inf, rightly so, where q is 1
            return max(0.0, float(accountant.get_epsilon(delta=delta)))


_ACCOUNTANTS: dict[AccountantName, Accountant] = {"rdp": RdpAccountant(), "prv": PrvAccountant()}


def epsilon_of(history: Iterable[Charge], delta: float, accountant: AccountantName = "rdp") -> float:
    """Return epsilon at ``delta`` of ``history``; computed once per distinct history, then looked up."""
    if not 0 < delta < 1:
        raise AccountingError(f"expected 0 < delta < 1, got delta={delta} (set 'delta' in the run config)")
    if accountant not in _ACCOUNTANTS:
        raise AccountingError(f"unknown accountant {accountant!r}: expected one of {get_args(AccountantName)}")
    return _cached_epsilon(merged(history), delta, accountant)


def calibrate_noise_multiplier(
    *, epsilon: float, delta: float, sampling_rate: float, steps: int, accountant: AccountantName = "rdp"
) -> float:
    """Return a noise multiplier z with which ``steps`` steps cost at most ``epsilon`` at ``delta``.

    Computes: bisection on z, on which epsilon falls monotonically, until z is known to 4 digits.
    Guarantees: ``epsilon_of`` the returned z is never above ``epsilon`` (the upper end of the bracket is returned).
    Edge cases: a budget that no z up to 10^5 meets is an AccountingError.
    """
    if not epsilon > 0:
        raise AccountingError(f"expected epsilon > 0, got epsilon={epsilon} (set 'epsilon' in the run config)")
    if steps < 1:
        raise AccountingError(f"expected at least one step to calibrate for, got {steps}")

    def cost(z: float) -> float:
        return epsilon_of((Charge(z, sampling_rate, steps),), delta, accountant)

    enough = 1.0
    while cost(enough) > epsilon:
        enough *= 2
        if enough > 1e5:
            raise AccountingError(
                f"no noise multiplier up to 100000 meets epsilon={epsilon} at delta={delta} over {steps} steps: "
                "raise 'epsilon' or lower 'rounds', 'steps-per-round' or 'sampling-rate'"
            )
    too_little = enough / 2
    while too_little > 1e-2 and cost(too_little) <= epsilon:
        enough, too_little = too_little, too_little / 2
    while enough - too_little > 1e-4 * enough:
        middle = (enough + too_little) / 2
        if cost(middle) <= epsilon:
            enough = middle
        else:
            too_little = middle
    return enough


def _opacus_rdp() -> Any:
    from opacus.accountants.analysis import rdp  # imports torch: only where it is asked for

    return rdp


@lru_cache(maxsize=4096)
def _rdp_of_one_step(sampling_rate: float, noise_multiplier: float) -> NDArray[np.float64]:
    rdp = _opacus_rdp().compute_rdp(q=sampling_rate, noise_multiplier=noise_multiplier, steps=1, orders=_RDP_ORDERS)
    # At very high orders binomials overflow to nan or inf; such an order proves nothing, so it must not win.
    return np.nan_to_num(np.asarray(rdp, dtype=np.float64), nan=np.inf, posinf=np.inf)


@lru_cache(maxsize=65536)
def _cached_epsilon(history: History, delta: float, accountant: AccountantName) -> float:
    with warnings.catch_warnings():
        # "Optimal order is the largest alpha" and the like: the bound is valid, only perhaps not the tightest.
        warnings.filterwarnings("ignore", message="Optimal order is")
        return _ACCOUNTANTS[accountant].epsilon(history, delta)
