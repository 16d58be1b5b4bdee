"""What a history of noisy steps costs, and how much noise a budget asks for.

Unit of privacy: one record. Neighbouring data sets differ by adding or removing one record. Every step is a Poisson
sample with rate q of the records, of which something is released: mostly the clipped sum with Gaussian noise of std
z * clip_norm; ``Charge`` says what else there may be.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import lt
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from common.errors import AccountingError
from common.renyi import added, gaussian_curve, pure_curve, sampled, zcdp_curve

AccountantName = Literal["rdp", "prv", "pld"]
PrivacyUnit = Literal["record", "client"]


def neighbours_of(unit: PrivacyUnit) -> str:
    """Return what two neighbouring data sets differ by: an epsilon means nothing without it."""
    if unit == "record":
        return "add or remove one record"
    if unit == "client":
        return "add or remove one site with all its records"
    raise AccountingError(f"unknown privacy unit {unit!r}: expected one of {get_args(PrivacyUnit)}")


PRIVACY_UNIT: PrivacyUnit = "record"
NEIGHBOURS = neighbours_of(PRIVACY_UNIT)

# Opacus' own orders, and some above them for small budgets.
_RDP_ORDERS = tuple([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + [80, 96, 128, 192, 256, 384, 512, 1024])


class Mechanism(NamedTuple):
    """What one step releases from a Poisson sample with rate ``sampling_rate``: the key of its Renyi curve."""

    noise_multiplier: float
    sampling_rate: float
    selection_rho: float = 0.0
    pure_epsilon: float = 0.0

    @property
    def is_gaussian(self) -> bool:
        """Whether it is the sampled Gaussian mechanism and nothing else."""
        return not self.selection_rho and not self.pure_epsilon

    @property
    def is_pure(self) -> bool:
        """Whether it is epsilon-DP with delta 0."""
        return self.noise_multiplier == math.inf and not self.selection_rho


@dataclass(frozen=True, slots=True, order=True)
class Charge:
    """``steps`` releases, each from a Poisson sample of its own with rate q.

    A release composes up to three mechanisms on the same sample: Gaussian noise with multiplier z (``inf``: none), a
    private selection that is ``selection_rho``-zCDP (0: none), and a mechanism that is ``pure_epsilon``-DP (0: none),
    such as Laplace noise. All three are stated as if the whole data were the sample: sampling is accounted here.
    Only the first ``selecting_steps`` of the steps select; 0: all of them do.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int
    selection_rho: float = 0.0
    pure_epsilon: float = 0.0
    selecting_steps: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.noise_multiplier < math.inf or (self.noise_multiplier == math.inf and self.pure_epsilon)):
            raise AccountingError(
                f"expected a finite noise_multiplier > 0, got {self.noise_multiplier}: no noise, no privacy"
            )
        if not 0 < self.sampling_rate <= 1:
            raise AccountingError(f"expected 0 < sampling_rate <= 1, got {self.sampling_rate}")
        if not self.steps >= 0:  # so that nan is refused too
            raise AccountingError(f"expected steps >= 0, got {self.steps}")
        for name in ("selection_rho", "pure_epsilon"):
            if not 0 <= getattr(self, name) < math.inf:
                raise AccountingError(f"expected a finite {name} >= 0, got {getattr(self, name)}")
        if not 0 <= self.selecting_steps <= self.steps or (self.selecting_steps and not self.selection_rho):
            raise AccountingError(
                f"expected 0 <= selecting_steps <= {self.steps} steps that select, got {self.selecting_steps}"
            )

    @property
    def parts(self) -> "tuple[Charge, ...]":
        """The same cost as charges whose steps are all alike."""
        others = self.steps - self.selecting_steps
        if not self.selecting_steps:
            return (self,)
        alike = Charge(
            self.noise_multiplier, self.sampling_rate, self.selecting_steps, self.selection_rho, self.pure_epsilon
        )
        rest = Charge(self.noise_multiplier, self.sampling_rate, others, 0.0, self.pure_epsilon)
        return (alike, rest) if others else (alike,)

    @property
    def mechanism(self) -> Mechanism:
        """What one of the steps releases, the first where they are not all alike."""
        return Mechanism(self.noise_multiplier, self.sampling_rate, self.selection_rho, self.pure_epsilon)

    def to_json(self) -> list[float]:
        """Return its numbers; those of the sampled Gaussian mechanism are three, as they always were."""
        numbers = [self.noise_multiplier, self.sampling_rate, self.steps]
        if self.mechanism.is_gaussian:
            return numbers
        numbers += [self.selection_rho, self.pure_epsilon]
        return [*numbers, self.selecting_steps] if self.selecting_steps else numbers


History = tuple[Charge, ...]


def merged(charges: Iterable[Charge]) -> History:
    """Return the same history with equal mechanisms added up and sorted: one key for one privacy loss."""
    charges = tuple(charges)
    if any(charge.selecting_steps for charge in charges):
        charges = tuple(part for charge in charges for part in charge.parts)
    mechanisms = [charge.mechanism for charge in charges]
    if all(map(lt, mechanisms, mechanisms[1:])) and all(charge.steps for charge in charges):
        return charges  # merged already, as a server's account is: the common case, and it must be fast
    steps: dict[Mechanism, int] = {}
    for charge in charges:
        steps[charge.mechanism] = steps.get(charge.mechanism, 0) + charge.steps
    return tuple(Charge(m[0], m[1], count, *m[2:]) for m, count in sorted(steps.items()) if count > 0)


class Accountant(Protocol):
    """Turns a history into epsilon at delta: an upper bound, never an estimate."""

    def epsilon(self, history: History, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` of everything in ``history``."""
        ...


class RdpAccountant:
    """Renyi accounting of the sampled Gaussian mechanism (Mironov et al. 2019), on Opacus' analysis."""

    def epsilon(self, history: History, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` of everything in ``history``."""
        return self.epsilons([history], delta)[0]

    def epsilons(self, histories: Sequence[History], delta: float) -> list[float]:
        """Return epsilon at ``delta`` of each of many histories, all in one matrix.

        Computes: rdp[history, order] = sum over its charges of steps * (curve of one step), then ``rdp_to_epsilon``.
        Guarantees: equal to the bit whether a history comes alone or among others.
        Edge cases: an empty history costs 0, where the conversion alone would say a little more.
        """
        rdp = np.zeros((len(histories), len(_RDP_ORDERS)))  # (histories, orders)
        spent: dict[Mechanism, tuple[list[int], list[int]]] = {}  # mechanism: (rows, their steps)
        for row, history in enumerate(histories):
            for charge in merged(history):
                rows, steps = spent.setdefault(charge.mechanism, ([], []))
                rows.append(row)
                steps.append(charge.steps)
        # Not one product of matrices: where the curve of a mechanism that a site never ran is infinite, that would say
        # 0 * inf = nan. Sorted, so that the sum does not depend on who else is in the matrix.
        for mechanism, (rows, steps) in sorted(spent.items()):
            rdp[rows] += np.array(steps, np.float64)[:, None] * _rdp_of_one_step(mechanism)
        epsilons = rdp_to_epsilon(rdp, np.array(_RDP_ORDERS), delta)
        epsilons[[not history for history in histories]] = 0.0
        if any(mechanism.is_pure for mechanism in spent):
            for row, history in enumerate(histories):
                if history and all(charge.mechanism.is_pure for charge in history):  # adding up may be tighter
                    epsilons[row] = min(epsilons[row], pure_epsilon_of(history))
        return list(map(float, epsilons))


class PrvAccountant:
    """Privacy random variables (Gopi et al. 2021), by Opacus: tighter than Renyi, slower."""

    def epsilon(self, history: History, delta: float) -> float:
        """Return the upper end of the PRV accountant's interval, 0.01 above its estimate."""
        if not history:
            return 0.0
        _require_gaussian(history, "prv")
        from opacus.accountants import PRVAccountant  # imports torch: only where it is asked for

        accountant = PRVAccountant()
        accountant.history = [(c.noise_multiplier, c.sampling_rate, c.steps) for c in history]
        # log(1 - q) is -inf, rightly so, where q is 1. PRV sizes its grid by Opacus' RDP, which warns when the best
        # order is its largest: the bound is valid, only the grid is wider than need be.
        with np.errstate(divide="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Optimal order is")
            return float(accountant.get_epsilon(delta=delta))


class PldAccountant:
    """Privacy loss distributions (Koskela et al. 2020; Doroshenko et al. 2022), by dp-accounting: the tightest."""

    def epsilon(self, history: History, delta: float) -> float:
        """Return the pessimistic epsilon: the privacy loss is discretised so that it dominates the true one.

        The grid stays at dp-accounting's 1e-4: one of 1e-3 is ten times faster, but at small sampling rates over many
        steps its pessimism adds up to more than Renyi accounting says.
        """
        try:
            from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
            from dp_accounting.pld import PLDAccountant
        except ImportError as error:
            raise AccountingError(
                "accountant 'pld' needs the package dp-accounting: pip install 'dp-accounting>=0.6,<0.7', "
                "or set 'accountant' to rdp or prv in the run config"
            ) from error
        if not history:
            return 0.0
        _require_gaussian(history, "pld")
        accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
        for charge in history:
            step = PoissonSampledDpEvent(charge.sampling_rate, GaussianDpEvent(charge.noise_multiplier))
            accountant.compose(step, charge.steps)
        return float(accountant.get_epsilon(delta))


_RDP = RdpAccountant()
_ACCOUNTANTS: dict[AccountantName, Accountant] = {"rdp": _RDP, "prv": PrvAccountant(), "pld": PldAccountant()}


def rdp_to_epsilon(rdp: NDArray[np.float64], orders: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """Return epsilon at ``delta`` of each row of Renyi divergences ``rdp``, one column per order.

    Computes: min over orders a of rdp[a] + log((a - 1) / a) - (log(delta) + log(a)) / (a - 1), and 0 if that is less.
    Guarantees: a mechanism with these divergences is (epsilon, delta)-DP under the same neighbouring relation.
    Edge cases: an infinite order never wins; a row with none but infinite orders is inf; nan stays nan.
    Source: Balle et al. 2020 (arXiv:1905.09982), Theorem 21; Canonne et al. 2020 (arXiv:2004.00010), Proposition 12.
    """
    penalty = np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)  # (orders,)
    epsilons: NDArray[np.float64] = np.maximum(0.0, np.min(rdp + penalty, axis=1))  # (rows,)
    return epsilons


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


def _opacus_rdp() -> Any:
    from opacus.accountants.analysis import rdp  # imports torch: only where it is asked for

    return rdp


def pure_epsilon_of(history: Iterable[Charge]) -> float:
    """Return epsilon, at delta 0, of a history of pure mechanisms: the sum over steps of log(1 + q (e^epsilon - 1)).

    Guarantees: with P and R as in ``common.renyi.sampled``, (1 - q) P + q R <= (1 + q (e^epsilon - 1)) P, and P is at
    most 1 / (1 - q + q e^-epsilon) times it, which is less; steps add up.
    Source: Balle, Barthe and Gaboardi, "Privacy amplification by subsampling" (2018), for Poisson sampling.
    """
    return sum(c.steps * _sampled_pure(c.pure_epsilon, c.sampling_rate) for c in history)


def _sampled_pure(epsilon: float, sampling_rate: float) -> float:
    if epsilon < 500:
        return math.log1p(sampling_rate * math.expm1(epsilon))
    return epsilon + math.log(
        sampling_rate + (1 - sampling_rate) * math.exp(-epsilon)
    )  # e^epsilon would not fit a double


def _require_gaussian(history: History, accountant: AccountantName) -> None:
    if not all(charge.mechanism.is_gaussian for charge in history):
        raise AccountingError(
            f"accountant {accountant!r} knows the sampled Gaussian mechanism alone, and this history has others: "
            "set 'accountant' to rdp"
        )


@lru_cache(maxsize=4096)
def _rdp_of_one_step(mechanism: Mechanism) -> NDArray[np.float64]:
    if not mechanism.is_gaussian:
        step = added(
            gaussian_curve(mechanism.noise_multiplier),
            zcdp_curve(mechanism.selection_rho),
            pure_curve(mechanism.pure_epsilon),
        )
        return sampled(step, mechanism.sampling_rate, np.array(_RDP_ORDERS))
    rdp = _opacus_rdp().compute_rdp(
        q=mechanism.sampling_rate, noise_multiplier=mechanism.noise_multiplier, steps=1, orders=_RDP_ORDERS
    )
    # At very high orders binomials overflow to nan or inf; such an order proves nothing, so it must not win.
    return np.nan_to_num(np.asarray(rdp, dtype=np.float64), nan=np.inf, posinf=np.inf)


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
