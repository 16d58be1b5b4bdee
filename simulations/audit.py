"""Auditing in one run: does what a site releases tell more than the claimed epsilon allows?

Many canaries, each put into the site's data or left out by a coin; the real site carries out real plans; then, from
the releases alone, the audit guesses for the most and the least conspicuous canaries whether they were in. Under
differential privacy only so many guesses can be right, so that many right guesses prove a lower bound on epsilon. A
bound above the claim means that the mechanism, or the accounting, is broken.

Source: the game is that of Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (2023). What it
proves is computed from the whole curve of a claim, not from its epsilon at one delta: Mahloujifar, Melis and Chaudhuri,
"Auditing f-differential privacy in one run" (2024).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr

from client.randomness import OsRandomness, Randomness
from common.accounting import epsilon_of
from common.charges import History
from common.errors import ConfigError
from common.randomness import RoundRandomness, SecureRandomness
from simulations.audit_plan import AuditPlan
from simulations.canaries import scores_of
from simulations.report.summary import AUDIT_NAME as AUDIT_NAME

Claim = tuple[float, float]  # epsilon, delta
Curve = Callable[[float], float]

_CONFIDENCE = 0.95
_DELTAS = tuple(np.geomspace(1e-7, 0.5, 60).tolist())
_LARGEST_FACTOR = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What the audit found.

    ``lower_bound`` is the claimed epsilon times the factor by which the claim, at every delta, is ruled out at 95 %
    confidence; above the claim it is a proof of a fault.
    """

    claimed_epsilon: float
    lower_bound: float
    delta: float
    canaries: int
    guesses: int
    right: int

    @property
    def passed(self) -> bool:
        """Whether the claim stands."""
        return self.lower_bound <= self.claimed_epsilon


def audit(
    plan: AuditPlan,
    canaries: int,
    seed: int,
    randomness: Callable[[], Randomness] = OsRandomness,
    server_randomness: Callable[[], RoundRandomness] = SecureRandomness.fresh,
) -> AuditResult:
    """Run the mechanism on canaries and return what can be proved from its releases.

    ``seed`` decides which canaries are in; noise and sampling are the site's own.
    """
    if canaries < 100:
        raise ConfigError(f"expected at least 100 canaries, got {canaries}: with fewer nothing can be proved")
    included = np.random.default_rng(seed).random(canaries) < 0.5
    scores = scores_of(plan, included, randomness, server_randomness)
    guesses = round(plan.guess_share * canaries / 2) * 2  # fixed before anything is seen, as the bound asks
    order = np.argsort(scores)
    right = int((~included[order[: guesses // 2]]).sum() + included[order[-(guesses // 2) :]].sum())
    claimed_epsilon = plan.claimed_epsilon(canaries)
    factor = factor_ruled_out(claims_of(plan.history(canaries)), canaries, guesses, right, 1 - _CONFIDENCE)
    return AuditResult(
        claimed_epsilon=claimed_epsilon,
        lower_bound=factor * claimed_epsilon,
        delta=plan.delta,
        canaries=canaries,
        guesses=guesses,
        right=right,
    )


def factor_ruled_out(claims: Sequence[Claim], canaries: int, guesses: int, right: int, significance: float) -> float:
    """Return the largest factor by which every epsilon of the claims could be multiplied and still be ruled out.

    Computes: bisection, since more guesses may be right the larger epsilon is. Above 1 the claims themselves are false.
    Edge cases: 0 where ``right`` may be luck; at most 16.
    """

    def ruled_out(factor: float) -> bool:
        scaled = curve_through([(factor * epsilon, delta) for epsilon, delta in claims])
        return is_ruled_out(scaled, canaries, guesses, right, significance)

    low, high = 0.0, _LARGEST_FACTOR
    if not ruled_out(low):
        return low
    for _ in range(20):
        middle = (low + high) / 2
        if ruled_out(middle):
            low = middle
        else:
            high = middle
    return low


def is_ruled_out(curve: Curve, canaries: int, guesses: int, right: int, significance: float) -> bool:
    """Say whether ``right`` right guesses or more are less likely than ``significance`` under a claim.

    Computes: let p_k be the probability of k right guesses; r_i, the sum over k >= i of k p_k / canaries, and h_i, that
    of (guesses - k) p_k / canaries, are how often a random canary is guessed right (wrong) while i or more are right.
    Whether i of the *other* guesses are right does not depend on that canary's own coin, so the claim holds of it:
    h_i >= curve(r_{i+1}). From p_right = significance and none above, downwards, with each p_k as small as that allows;
    ruled out if the p_k then add up to more than 1.
    Guarantees: valid for any mechanism that keeps the claim, however it mixes its canaries, if ``guesses`` was fixed
    beforehand. With the curve of (epsilon, 0) it is a little weaker than the tail of a binomial distribution, which
    Steinke et al. prove for that case.
    Edge cases: no right guess rules nothing out.
    Source: Mahloujifar et al. (2024), with two options for a canary: in and out.
    """
    rights, wrongs = significance * right / canaries, significance * (guesses - right) / canaries
    certain = guesses / canaries * (1 + 1e-12)  # where the p_k add up to 1
    for others in range(right - 1, -1, -1):
        fewest = max(wrongs, curve(rights))
        rights += others / (guesses - others) * (fewest - wrongs)
        wrongs = fewest
        if rights + wrongs > certain:
            return True
    return False


def claims_of(history: History) -> list[Claim]:
    """Return what a history claims: epsilon at many deltas.

    Computes: for Gaussian noise without sampling, with mu^2 the sum of steps / z^2, the exact
    delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu); else what Renyi accounting says.
    Source: Balle and Wang, "Improving the Gaussian mechanism for differential privacy" (2018).
    """
    if not all(charge.mechanism.is_gaussian and charge.sampling_rate == 1 for charge in history):
        return [(epsilon_of(history, delta), delta) for delta in _DELTAS]
    mu = math.sqrt(sum(charge.steps / charge.noise_multiplier**2 for charge in history))
    epsilons = np.linspace(0, mu * (mu / 2 + 6), 200)
    deltas = ndtr(mu / 2 - epsilons / mu) - np.exp(epsilons + log_ndtr(-mu / 2 - epsilons / mu))
    return list(zip(epsilons.tolist(), deltas.tolist(), strict=True))


def curve_through(claims: Sequence[Claim]) -> Curve:
    """Return the curve of a mechanism that keeps all the claims: x to how often a test is wrong that is right x often.

    Right: it says "in" of a record that is in; wrong: it says so though it is out, or both the other way round. It is
    wrong at least that often.

    Computes: the largest over them of 0, (x - delta) e^-epsilon and 1 - delta - (1 - x) e^epsilon.
    Source: Dong, Roth and Su, "Gaussian differential privacy" (2019), on (epsilon, delta) as a curve.
    """
    finite = np.array([claim for claim in claims if claim[0] < 700])  # e^epsilon fits a double; more claims nothing
    if not finite.size:
        return lambda x: 0.0
    epsilons, deltas = finite.T
    shrunk, grown = np.exp(-epsilons), np.exp(epsilons)

    def curve(x: float) -> float:
        return max(0.0, float(((x - deltas) * shrunk).max()), float((1 - deltas - (1 - x) * grown).max()))

    return curve
