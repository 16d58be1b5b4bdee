"""What noisy steps are charged: mechanisms, charges and histories of them.

Unit of privacy: one record. Neighbouring data sets differ by adding or removing one record. Every step is a Poisson
sample with rate q of the records, of which something is released: mostly the clipped sum with Gaussian noise of std
z * clip_norm; ``Charge`` says what else there may be. ``accounting`` tells what a history costs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import lt
from typing import Literal, NamedTuple, get_args

from common.errors import AccountingError

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
