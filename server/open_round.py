"""A round between asking and aggregating: who was asked, whose update counts, who was rejected and why."""

from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from flwr.app import Message

from common.coding import PartBytes
from common.plan import RoundPlan
from common.records import message_bytes
from server.admission import AdmittedUpdate, Rejection, admit
from server.federation import Member
from server.state import ServerState
from server.traffic import Traffic


@dataclass(slots=True)
class OpenRound:
    """What is known of a round between asking and aggregating."""

    plan: RoundPlan
    cohort: list[Member]
    started: float
    present: frozenset[int]  # nodes that were there when the round began
    rejections: dict[int, Rejection] = field(default_factory=dict)
    admitted: dict[int, AdmittedUpdate] = field(default_factory=dict)
    abandoned: bool = False

    @property
    def by_node(self) -> dict[int, Member]:
        """The cohort by the nodes that speak for it."""
        return {member.node_id: member for member in self.cohort}

    def take_reply(self, member: Member, reply: Message, traffic: Traffic) -> None:
        """Admit or reject a reply, and count its bytes."""
        verdict = admit(reply, self.plan, member.declared_size)
        total = message_bytes(reply)
        if isinstance(verdict, AdmittedUpdate):
            parts = verdict.parts + PartBytes(framing=total - verdict.parts.total)
        else:
            parts = PartBytes(framing=total)
        counts = isinstance(verdict, AdmittedUpdate) and member.site not in self.admitted
        traffic.received(member.site, parts, update=counts)
        if member.site in self.admitted:
            self.rejections[member.site] = Rejection("a second reply to the same round")
        elif isinstance(verdict, Rejection):
            self.rejections[member.site] = verdict
        else:
            self.admitted[member.site] = verdict

    def reject_silent(self, waited: float) -> None:
        """Reject the sites that have not answered within the ``waited`` seconds."""
        for member in self.cohort:
            if member.site not in self.admitted and member.site not in self.rejections:
                self.rejections[member.site] = Rejection(f"no reply within {waited:g} s")

    def has_refused(self, site: int) -> bool:
        """Tell whether a site said that it refused and spent nothing."""
        rejection = self.rejections.get(site)
        return rejection is not None and not rejection.spent and site not in self.admitted

    def count_in(self, state: ServerState) -> None:
        """Add the round to the counts of its sites; those that refused for good are dropped."""
        for site in self.rejections.keys() - self.admitted.keys():
            state.counts_of(site).rejected += 1
            if self.rejections[site].for_good:
                state.counts_of(site).dropped = self.rejections[site].reason
        for site in self.admitted:
            state.counts_of(site).admitted += 1

    def outcome(self) -> dict[str, Any]:
        """Return for the log who was asked for what, and who answered."""
        mask = self.plan.mask
        return {
            "round": self.plan.round,
            "epoch": mask.epoch,
            "density": mask.kept / mask.size,
            "kept": mask.kept,
            "cohort": [member.site for member in self.cohort],
            "admitted": len(self.admitted),
            "rejections": [{"site": s, "reason": r.reason} for s, r in sorted(self.rejections.items())],
            "abandoned": self.abandoned,
        }

    def bytes_spent(self, traffic: Traffic) -> dict[str, Any]:
        """Return for the log what travelled in the round, given its traffic."""
        return {
            "uplink": asdict(traffic.round_uplink.parts),
            "downlink": asdict(traffic.round_downlink.parts),
            "dense_uplink": traffic.round_uplink.dense,
            "dense_downlink": traffic.round_downlink.dense,
            "bits_per_parameter": _bits(traffic.round_uplink.parts.total, self.plan.mask.size * len(self.cohort)),
            "bits_per_value": _bits(
                sum(admitted.parts.values for admitted in self.admitted.values()),
                sum(admitted.values.size for admitted in self.admitted.values()),
            ),
            "sites": [
                [site, *astuple(parts.uplink), *astuple(parts.downlink)]
                for site, parts in sorted(traffic.round_sites.items())
            ],
        }


def _bits(count: int, of: int) -> float | None:
    return round(8 * count / of, 4) if of else None
