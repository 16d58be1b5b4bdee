"""Auditing in one run: does what a site releases tell more than the claimed epsilon allows?

Many canaries, each put into the site's data or left out by a coin; the real site carries out real plans; then, from
the releases alone, the audit guesses for the most and the least conspicuous canaries whether they were in. Under
(epsilon, delta)-differential privacy only so many guesses can be right, so that many right guesses prove a lower bound
on epsilon. A bound above the claim means that the mechanism, or the accounting, is broken.

Source: Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (2023).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from client.randomness import OsRandomness, Randomness
from common.errors import ConfigError
from common.randomness import RoundRandomness, SecureRandomness
from simulations.audit_plan import AuditPlan
from simulations.canaries import scores_of
from simulations.report.summary import AUDIT_NAME as AUDIT_NAME

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What the audit found. ``lower_bound`` holds with 95 % confidence; above the claim it is a proof of a fault."""

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
        lower_bound=epsilon_lower_bound(canaries, guesses, right, plan.delta, 1 - _CONFIDENCE),
        delta=plan.delta,
        canaries=canaries,
        guesses=guesses,
        right=right,
    )


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of ``right`` right guesses or more under (epsilon, delta)-DP.

    Computes: with f(v) = P[Binomial(guesses, e^epsilon / (1 + e^epsilon)) >= v],
    f(right) + 2 canaries delta max over i >= 1 of (f(right - i) - f(right)) / i, at most 1.
    Source: Steinke et al. (2023), Theorem 5.2.
    """
    chance = 1 / (1 + np.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    steps = np.arange(1, right + 1)
    gained = np.cumsum(binom.pmf(right - steps, guesses, chance))
    slack = float((gained / steps).max()) if right else 0.0
    return min(1.0, tail + 2 * canaries * delta * slack)


def epsilon_lower_bound(canaries: int, guesses: int, right: int, delta: float, significance: float) -> float:
    """Return the largest epsilon that ``right`` right guesses rule out at ``significance``; 0 where none is."""
    low, high = 0.0, 1.0
    if p_value(canaries, guesses, right, 0.0, delta) >= significance:
        return 0.0
    while p_value(canaries, guesses, right, high, delta) < significance and high < 64:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if p_value(canaries, guesses, right, middle, delta) < significance:
            low = middle
        else:
            high = middle
    return low
