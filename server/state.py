"""What a server knows of a run from round to round."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server.aggregate import ModelAverage, ServerOptimizer
from server.federation import Member
from server.privacy import PrivacyAccount
from server.traffic import Traffic


@dataclass(slots=True)
class SiteCounts:
    """How often a site's replies were admitted and rejected; why it is asked no more, if it is not."""

    admitted: int = 0
    rejected: int = 0
    dropped: str = ""


@dataclass(slots=True)
class ServerState:
    """What changes from round to round, and must survive a restart."""

    optimizer: ServerOptimizer
    average: ModelAverage
    privacy: PrivacyAccount
    traffic: Traffic
    # Tells this run from an earlier one of the same name, of which sites may remember the rounds.
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    rounds_done: int = 0
    model_version: int = 0
    seconds: float = 0.0
    counts: dict[int, SiteCounts] = field(default_factory=dict)

    def counts_of(self, site: int) -> SiteCounts:
        """Return the counts of a site, to read and to change."""
        return self.counts.setdefault(site, SiteCounts())

    def site_table(self, members: Sequence[Member], *, private: bool) -> list[dict[str, Any]]:
        """Return one row per site for the end of the log."""
        epsilons = self.privacy.epsilons()
        rows = []
        for member in members:
            traffic, counts = self.traffic.sites.get(member.site), self.counts_of(member.site)
            rows.append(
                {
                    "site": member.site,
                    "epsilon": epsilons.get(member.site, 0.0) if private else None,
                    "uplink": traffic.uplink.total if traffic else 0,
                    "downlink": traffic.downlink.total if traffic else 0,
                    "admitted": counts.admitted,
                    "rejected": counts.rejected,
                    "dropped": counts.dropped or None,
                }
            )
        return rows
