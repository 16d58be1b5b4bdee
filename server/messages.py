"""The messages of a round: those that ask its cohort, and those that ask some of it once more."""

import time
from collections.abc import Iterable, Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from common.coding import PartBytes
from common.records import Request, message_bytes
from common.signing import PlanSigner
from server.admission import Rejection, wants_model
from server.downlink import Downlink
from server.federation import Member
from server.grid import is_away
from server.open_round import OpenRound
from server.traffic import Traffic

_LEAST_SHARE = 0.2  # of a round's time, for a site that is asked once more
_PATIENCE = 90.0  # seconds for a node to come back that went away in the middle of a round


class RoundMessages:
    """Addresses a round to sites, with the model that each of them needs, and counts the bytes."""

    def __init__(
        self, *, downlink: Downlink, signer: PlanSigner | None, traffic: Traffic, round_deadline: float
    ) -> None:
        self._downlink = downlink
        self._signer = signer
        self._traffic = traffic
        self._round_deadline = round_deadline

    def address(
        self, current: OpenRound, members: Sequence[Member], ttl: float, *, again: bool = False
    ) -> list[Message]:
        """Return the round's messages to ``members``; those who hold the same model share one content."""
        plan = current.plan.to_bytes()
        signature = b"" if self._signer is None else self._signer.sign(plan)
        by_model: dict[int, list[Member]] = {}
        for member in members:
            by_model.setdefault(id(self._downlink.bytes_for(member.site)), []).append(member)
        messages = []
        for group in by_model.values():
            model = self._downlink.bytes_for(group[0].site)
            content = Request(plan, model, signature).to_content()
            addressed = [Message(content, m.node_id, "train", ttl=ttl, group_id=str(current.plan.round)) for m in group]
            # The content is the same for all of a group: what the first message costs, every one costs.
            payload = self._downlink.parts_of(model) + PartBytes(header=len(plan) + len(signature))
            framing = message_bytes(addressed[0]) - payload.total
            for member in group:
                self._traffic.sent(member.site, payload + PartBytes(framing=framing), again=again)
            messages += addressed
        return messages

    def answers_in_full(
        self, current: OpenRound, grid: Grid, replies: Iterable[Message], deadline: float
    ) -> Iterator[Message]:
        """Yield the replies, and those of sites that had to be asked once more.

        These are sites that wanted the whole model, and sites whose node went away while they were asked: they may have
        been charged, and give the same release for the same charge once the node is back.
        """
        by_node = current.by_node
        wanting: list[Member] = []
        away: list[Member] = []
        for reply in replies:
            member = by_node.get(reply.metadata.src_node_id)
            if member is not None and wants_model(reply):
                self._traffic.received(member.site, PartBytes(framing=message_bytes(reply)), update=False)
                self._downlink.forget(member.site)
                wanting.append(member)
            elif member is not None and member.node_id in current.present and is_away(reply):
                away.append(member)
            else:
                yield reply
        least = _LEAST_SHARE * self._round_deadline
        back = _returned(grid, away, min(time.monotonic() + _PATIENCE, deadline - least)) if away else []
        left = deadline - time.monotonic()
        # With hardly any time left a site would train, and be charged, for an answer that comes too late.
        if left <= least:
            for member in wanting:
                current.rejections[member.site] = Rejection("wanted the whole model too late in the round", spent=False)
        elif wanting or back:
            yield from grid.send_and_receive(self.address(current, [*wanting, *back], left, again=True), timeout=left)


def _returned(grid: Grid, away: Sequence[Member], deadline: float) -> list[Member]:
    """Return those of ``away`` whose nodes are back before ``deadline``."""
    while True:
        there = set(grid.get_node_ids())
        back = [member for member in away if member.node_id in there]
        if len(back) == len(away) or time.monotonic() >= deadline:
            return back
        time.sleep(0.5)
