"""Privacy as the server sees it: what each site may have spent by answering."""

from dataclasses import dataclass, field
from typing import Any

from common.accountants import AccountantName
from common.accounting import epsilon_of, epsilons_of
from common.charges import Charge, merged


@dataclass(slots=True)
class PrivacyAccount:
    """Charges per site, and their epsilon at ``delta``.

    A site is charged when it was asked and did not say that it refused: a lost reply may have been seen by somebody.
    """

    delta: float
    accountant: AccountantName
    _charges: dict[int, tuple[Charge, ...]] = field(default_factory=dict)

    def charge(self, site: int, charge: Charge) -> None:
        """Add what one round cost a site."""
        self._charges[site] = merged((*self._charges.get(site, ()), charge))

    def epsilon(self, site: int) -> float:
        """Return epsilon of a site."""
        return epsilon_of(self._charges.get(site, ()), self.delta, self.accountant)

    def largest_epsilon(self) -> float:
        """Return the largest epsilon over all sites."""
        return max(self.epsilons().values(), default=0.0)

    def epsilons(self) -> dict[int, float]:
        """Return epsilon of every site that was ever charged; all at once, which is much faster than one by one."""
        return dict(zip(self._charges, epsilons_of(self._charges.values(), self.delta, self.accountant), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return the charges for a checkpoint."""
        return {str(site): [charge.to_json() for charge in history] for site, history in self._charges.items()}

    def restore(self, raw: dict[str, Any]) -> None:
        """Restore the charges from a checkpoint."""
        self._charges = {int(site): tuple(Charge(*charge) for charge in history) for site, history in raw.items()}
