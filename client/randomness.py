"""Where a site's secret randomness comes from: which records a step samples, and the noise that hides them.

Sampling and noise use streams of their own, neither related to the public seed of the mask.
"""

from typing import Protocol

from common.randomness import RoundRandomness, SecureRandomness


class Randomness(Protocol):
    """A site's source of randomness."""

    def for_round(self, run: str, round_number: int) -> RoundRandomness:
        """Return the randomness of a round."""
        ...


class OsRandomness:
    """Fresh keys from the operating system for every round; nothing repeats and nothing can be replayed."""

    def for_round(self, run: str, round_number: int) -> SecureRandomness:
        """Return streams under new keys."""
        return SecureRandomness.fresh()
