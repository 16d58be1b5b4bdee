"""The accountants: each turns a history of charges into epsilon at delta.

``accounting`` chooses among them, remembers what they said, and calibrates noise with them.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from common.charges import Charge, History, Mechanism, merged
from common.errors import AccountingError
from common.renyi import added, gaussian_curve, pure_curve, sampled, zcdp_curve

AccountantName = Literal["rdp", "prv", "pld"]

# Opacus' own orders, and some above them for small budgets.
_RDP_ORDERS = tuple([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + [80, 96, 128, 192, 256, 384, 512, 1024])


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
