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

    @property
    def saving(self) -> float:
        """How many times fewer bytes than dense float32; 1 where nothing went."""
        return self.dense / self.parts.total if self.parts.total else 1.0


@dataclass(slots=True)
class SiteTraffic:
    """What went to and came from one site."""

    uplink: PartBytes = PartBytes()
    downlink: PartBytes = PartBytes()


@dataclass(slots=True)
class Traffic:
    """Totals of a run, and of its current round."""

    size: int
    uplink: Direction = field(default_factory=Direction)
    downlink: Direction = field(default_factory=Direction)
    round_uplink: Direction = field(default_factory=Direction)
    round_downlink: Direction = field(default_factory=Direction)
    sites: dict[int, SiteTraffic] = field(default_factory=dict)
    round_sites: dict[int, SiteTraffic] = field(default_factory=dict)

    def begin_round(self) -> None:
        """Start counting a new round."""
        self.round_uplink, self.round_downlink = Direction(), Direction()
        self.round_sites = {}

    def sent(self, site: int, parts: PartBytes, *, again: bool = False) -> None:
        """Count a message to a site; one that is sent ``again`` in a round would not have been with dense float32."""
        for direction in (self.downlink, self.round_downlink):
            direction.add(parts, 0 if again else 4 * self.size)
        for traffic in self._of(site):
            traffic.downlink += parts

    def received(self, site: int, parts: PartBytes, *, update: bool = True) -> None:
        """Count a message from a site, admitted or not: it has travelled.

        ``update``: it brought one that counts; whatever else came is a cost and no saving.
        """
        for direction in (self.uplink, self.round_uplink):
            direction.add(parts, 4 * self.size if update else 0)
        for traffic in self._of(site):
            traffic.uplink += parts

    @property
    def uplink_saving(self) -> float:
        """How many times fewer bytes than dense float32 went up."""
        return self.uplink.saving

    @property
    def total_saving(self) -> float:
        """How many times fewer bytes than dense float32 went both ways together."""
        both = Direction(self.uplink.parts + self.downlink.parts, self.uplink.dense + self.downlink.dense)
        return both.saving

    def _of(self, site: int) -> tuple[SiteTraffic, SiteTraffic]:
        return self.sites.setdefault(site, SiteTraffic()), self.round_sites.setdefault(site, SiteTraffic())

    def to_json(self) -> dict[str, Any]:
        """Return the totals for a checkpoint."""
        return {
            "uplink": [asdict(self.uplink.parts), self.uplink.dense],
            "downlink": [asdict(self.downlink.parts), self.downlink.dense],
            "sites": {str(site): [asdict(t.uplink), asdict(t.downlink)] for site, t in self.sites.items()},
        }

    @classmethod
    def from_json(cls, size: int, raw: dict[str, Any]) -> "Traffic":
        """Restore the totals from a checkpoint."""
        (up, up_dense), (down, down_dense) = raw["uplink"], raw["downlink"]
        return cls(
            size,
            Direction(PartBytes(**up), up_dense),
            Direction(PartBytes(**down), down_dense),
            sites={
                int(site): SiteTraffic(PartBytes(**uplink), PartBytes(**downlink))
                for site, (uplink, downlink) in raw["sites"].items()
            },
        )
