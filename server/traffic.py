"""Traffic: bytes per site, round, direction and part, counted on what is really serialised."""

from dataclasses import asdict, dataclass, field
from typing import Any

from common.coding import PartBytes


@dataclass(slots=True)
class Direction:
    """Bytes that went one way: what they were, and what the same messages would have cost as dense float32."""

    parts: PartBytes = PartBytes()
    dense: int = 0

    def add(self, parts: PartBytes, dense: int) -> None:
        """Count one message."""
        self.parts = self.parts + parts
        self.dense += dense


@dataclass(slots=True)
class SiteTraffic:
    """Totals of one site."""

    uplink: int = 0
    downlink: int = 0


@dataclass(slots=True)
class Traffic:
    """Totals of a run, and of its current round."""

    size: int
    uplink: Direction = field(default_factory=Direction)
    downlink: Direction = field(default_factory=Direction)
    round_uplink: Direction = field(default_factory=Direction)
    round_downlink: Direction = field(default_factory=Direction)
    sites: dict[int, SiteTraffic] = field(default_factory=dict)

    def begin_round(self) -> None:
        """Start counting a new round."""
        self.round_uplink, self.round_downlink = Direction(), Direction()

    def sent(self, site: int, parts: PartBytes) -> None:
        """Count a message to a site."""
        for direction in (self.downlink, self.round_downlink):
            direction.add(parts, 4 * self.size)
        self._of(site).downlink += parts.total

    def received(self, site: int, parts: PartBytes) -> None:
        """Count a message from a site, admitted or not: it has travelled."""
        for direction in (self.uplink, self.round_uplink):
            direction.add(parts, 4 * self.size)
        self._of(site).uplink += parts.total

    @property
    def uplink_saving(self) -> float:
        """How many times fewer bytes than dense float32 went up."""
        return self.uplink.dense / self.uplink.parts.total if self.uplink.parts.total else 1.0

    def _of(self, site: int) -> SiteTraffic:
        return self.sites.setdefault(site, SiteTraffic())

    def to_json(self) -> dict[str, Any]:
        """Return the totals for a checkpoint."""
        return {
            "uplink": [asdict(self.uplink.parts), self.uplink.dense],
            "downlink": [asdict(self.downlink.parts), self.downlink.dense],
            "sites": {str(site): [t.uplink, t.downlink] for site, t in self.sites.items()},
        }

    @classmethod
    def from_json(cls, size: int, raw: dict[str, Any]) -> "Traffic":
        """Restore the totals from a checkpoint."""
        (up, up_dense), (down, down_dense) = raw["uplink"], raw["downlink"]
        return cls(
            size,
            Direction(PartBytes(**up), up_dense),
            Direction(PartBytes(**down), down_dense),
            sites={int(site): SiteTraffic(*totals) for site, totals in raw["sites"].items()},
        )
