"""Auditing in one run: does what a site releases tell more than the claimed epsilon allows?

Many canaries, each put into the site's data or left out by a coin; the real site carries out real plans; then, from
the releases alone, the audit guesses for the most and the least conspicuous canaries whether they were in. Under
differential privacy only so many guesses can be right, so that many right guesses prove a lower bound on epsilon. A
bound above the claim means that the mechanism, or the accounting, is broken.

Source: the game is that of Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (2023). What it
proves is computed from the whole curve of a claim, not from its epsilon at one delta, which proves about twice as much:
Mahloujifar, Melis and Chaudhuri, "Auditing f-differential privacy in one run" (2024).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr, ndtri

from client.randomness import OsRandomness, Randomness
from common.accounting import epsilon_of
from common.charges import History
from common.errors import ConfigError
from common.randomness import RoundRandomness, SecureRandomness
from simulations.audit_plan import AuditPlan
from simulations.canaries import scores_of
from simulations.report.summary import AUDIT_NAME as AUDIT_NAME

Curve = Callable[[float], float]  # how often one is wrong at least, who is right so often: see curve_of

_CONFIDENCE = 0.95
_CURVE_DELTAS = tuple(np.geomspace(1e-7, 0.5, 60).tolist())
_WIDEST = 16.0  # noise multipliers are tried between a 16th and 16 times the claimed one


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What the audit found.

    ``lower_bound`` is the claim of the same mechanism with as much noise as the guesses just rule out, at 95 %
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
    guesses = max(2, round(plan.guess_share * canaries / 2)) * 2  # fixed before anything is seen, as the bound asks
    order = np.argsort(scores)
    right = int((~included[order[: guesses // 2]]).sum() + included[order[-(guesses // 2) :]].sum())
    return AuditResult(
        claimed_epsilon=plan.claimed_epsilon(canaries),
        lower_bound=epsilon_lower_bound(plan, canaries, guesses, right, 1 - _CONFIDENCE),
        delta=plan.delta,
        canaries=canaries,
        guesses=guesses,
        right=right,
    )


def epsilon_lower_bound(plan: AuditPlan, canaries: int, guesses: int, right: int, significance: float) -> float:
    """Return what the mechanism of ``plan`` claims with the least noise that ``right`` right guesses rule out.

    Computes: bisection on the noise, to 0.1 %, since with more of it fewer guesses may be right.
    Edge cases: 0 where nothing is ruled out, not even 16 times the noise; at most the claim of a 16th of it.
    """

    def with_noise(factor: float) -> AuditPlan:
        return replace(plan, noise_multiplier=factor * plan.noise_multiplier)

    def ruled_out(factor: float) -> bool:
        return is_ruled_out(curve_of(with_noise(factor).history(canaries)), canaries, guesses, right, significance)

    too_little, enough = 1 / _WIDEST, _WIDEST
    if not ruled_out(enough):
        return 0.0
    if ruled_out(too_little):
        enough = too_little
    while enough > 1.001 * too_little:
        middle = math.sqrt(too_little * enough)
        if ruled_out(middle):
            enough = middle
        else:
            too_little = middle
    return with_noise(enough).claimed_epsilon(canaries)


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


def curve_of(history: History) -> Curve:
    """Return the curve of a history: how often a test must at least be wrong that is right so often.

    Right: it says "in" of a record that is in; wrong: it says so though it is out, or both the other way round.
    Computes: for Gaussian noise without sampling, Phi(Phi^-1(x) - mu) with mu^2 the sum of steps / z^2; else what
    Renyi accounting says at many deltas, each of which is a claim: see ``curve_through``.
    Source: Dong, Roth and Su, "Gaussian differential privacy" (2019).
    """
    if all(charge.mechanism.is_gaussian and charge.sampling_rate == 1 for charge in history):
        mu = math.sqrt(sum(charge.steps / charge.noise_multiplier**2 for charge in history))
        return lambda x: float(ndtr(ndtri(x) - mu)) if 0 < x < 1 else min(max(x, 0.0), 1.0)
    return curve_through([(epsilon_of(history, delta), delta) for delta in _CURVE_DELTAS])


def curve_through(claims: Sequence[tuple[float, float]]) -> Curve:
    """Return the curve of a mechanism that keeps every one of the claims (epsilon, delta).

    Computes: the largest over them of 0, (x - delta) e^-epsilon and 1 - delta - (1 - x) e^epsilon.
    Source: Dong et al. (2019), on (epsilon, delta) as a curve.
    """
    finite = np.array([claim for claim in claims if claim[0] < 700])  # e^epsilon fits a double; more claims nothing
    if not finite.size:
        return lambda x: 0.0
    epsilons, deltas = finite.T
    shrunk, grown = np.exp(-epsilons), np.exp(epsilons)

    def curve(x: float) -> float:
        return max(0.0, float(((x - deltas) * shrunk).max()), float((1 - deltas - (1 - x) * grown).max()))

    return curve
