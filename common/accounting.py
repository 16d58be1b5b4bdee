"""What a history of charges costs, and how much noise a budget asks for.

``charges`` says what a step is charged and for whom; ``accountants`` compute.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import get_args

from common.accountants import Accountant, AccountantName, PldAccountant, PrvAccountant, RdpAccountant
from common.charges import Charge, History, merged
from common.errors import AccountingError

_RDP = RdpAccountant()
_ACCOUNTANTS: dict[AccountantName, Accountant] = {"rdp": _RDP, "prv": PrvAccountant(), "pld": PldAccountant()}


def epsilon_of(history: Iterable[Charge], delta: float, accountant: AccountantName = "rdp") -> float:
    """Return epsilon at ``delta`` of ``history``; computed once per distinct history, then looked up."""
    _check(delta, accountant)
    return _cached_epsilon(merged(history), delta, accountant)


def epsilons_of(histories: Iterable[Iterable[Charge]], delta: float, accountant: AccountantName = "rdp") -> list[float]:
    """Return what ``epsilon_of`` says of each history, in order; equal histories are computed once.

    Under "rdp" all of them are one matrix: 10,000 sites that all differ take a fraction of a second. The others compose
    whole distributions, one history after the other.
    """
    _check(delta, accountant)
    keys = [merged(history) for history in histories]
    distinct = list(dict.fromkeys(keys))
    if accountant == "rdp":
        found = [_checked(epsilon, key) for epsilon, key in zip(_RDP.epsilons(distinct, delta), distinct, strict=True)]
    else:
        found = [_cached_epsilon(history, delta, accountant) for history in distinct]
    epsilons = dict(zip(distinct, found, strict=True))
    return [epsilons[key] for key in keys]


def calibrate_noise_multiplier(
    *, epsilon: float, delta: float, sampling_rate: float, steps: int, accountant: AccountantName = "rdp"
) -> float:
    """Return a noise multiplier z with which ``steps`` steps cost at most ``epsilon`` at ``delta``.

    Computes, guarantees and edge cases: see ``calibrate``.
    """
    if steps < 1:
        raise AccountingError(f"expected at least one step to calibrate for, got {steps}")

    def history(z: float) -> History:
        return (Charge(z, sampling_rate, steps),)

    return calibrate(history, epsilon=epsilon, delta=delta, accountant=accountant)


def calibrate(
    history: Callable[[float], Iterable[Charge]], *, epsilon: float, delta: float, accountant: AccountantName = "rdp"
) -> float:
    """Return a noise multiplier z with which ``history(z)`` costs at most ``epsilon`` at ``delta``.

    Computes: bisection on z, on which epsilon falls monotonically, until z is known to 4 digits.
    Guarantees: ``epsilon_of`` the returned z is never above ``epsilon`` (the upper end of the bracket is returned).
    Edge cases: a budget that no z up to 10^5 meets is an AccountingError.
    """
    if not epsilon > 0:
        raise AccountingError(f"expected epsilon > 0, got epsilon={epsilon} (set 'epsilon' in the run config)")

    def cost(z: float) -> float:
        return epsilon_of(history(z), delta, accountant)

    enough = 1.0
    while cost(enough) > epsilon:
        enough *= 2
        if enough > 1e5:
            charges = merged(history(1.0))
            picks = "'pick-epsilon', 'final-density', " if any(charge.selection_rho for charge in charges) else ""
            raise AccountingError(
                f"no noise multiplier up to 100000 meets epsilon={epsilon} at delta={delta} over "
                f"{sum(charge.steps for charge in charges)} steps: "
                f"raise 'epsilon' or lower {picks}'rounds', 'steps-per-round' or 'sampling-rate'"
            )
    too_little = enough / 2
    while too_little > 1e-2 and cost(too_little) <= epsilon:
        enough, too_little = too_little, too_little / 2
    if len(merged(history(enough))) > 1:
        too_little, enough = _narrowed(cost, epsilon, too_little, enough)
    while enough - too_little > 1e-4 * enough:
        middle = (enough + too_little) / 2
        if cost(middle) <= epsilon:
            enough = middle
        else:
            too_little = middle
    return enough


def _narrowed(cost: Callable[[float], float], epsilon: float, too_little: float, enough: float) -> tuple[float, float]:
    """Return a narrower bracket of z, by secants: log epsilon is nearly a line in log z.

    For histories of many mechanisms, each of which costs a curve of its own for every z that is tried.
    """
    if not cost(enough):
        return too_little, enough
    tried = [(math.log(z), math.log(cost(z))) for z in (too_little, enough)]
    for _ in range(5):
        (x0, y0), (x1, y1) = tried[-2:]
        if y0 == y1 or enough - too_little <= 1e-4 * enough:
            break
        guess = math.exp(x1 + (math.log(epsilon) - y1) * (x1 - x0) / (y1 - y0))
        close = abs(math.log(guess) - x1) < 1e-3  # then both sides of it close the bracket
        for near in (guess * (1 + 3e-5), guess * (1 - 3e-5)) if close else (guess,):
            if too_little < near < enough and (found := cost(near)):
                tried.append((math.log(near), math.log(found)))
                enough, too_little = (near, too_little) if found <= epsilon else (enough, near)
    return too_little, enough


@lru_cache(maxsize=65536)
def _cached_epsilon(history: History, delta: float, accountant: AccountantName) -> float:
    return _checked(_ACCOUNTANTS[accountant].epsilon(history, delta), history)


def _checked(epsilon: float, history: History) -> float:
    # max(0.0, nan) is 0.0 in Python: a failed computation would read as perfect privacy.
    if math.isnan(epsilon):
        raise AccountingError(f"the accountant found no epsilon (nan) for {history}: use another accountant")
    return max(0.0, epsilon)


def _check(delta: float, accountant: AccountantName) -> None:
    if not 0 < delta < 1:
        raise AccountingError(f"expected 0 < delta < 1, got delta={delta} (set 'delta' in the run config)")
    if accountant not in _ACCOUNTANTS:
        raise AccountingError(f"unknown accountant {accountant!r}: expected one of {get_args(AccountantName)}")
