"""Our count of a run's bytes beside the SuperLink's own, the difference explained line by line.

We count what Flower serialises for a message: its objects, each with its head. The SuperLink counts these objects when
a node fetches or brings them, and besides them the envelopes: the requests and responses in which a node learns of a
message (PullMessages) and announces its reply (PushMessages). It also sees the messages with which sites introduce
themselves, which are no part of a round. Heads of HTTP and TLS are counted by neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    Reconnect,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree

from common.coding import PartBytes
from common.records import Introduction, message_bytes
from deployment.superlink import RunStatus
from server.runlog import Event

_ID = 1 << 63  # as long as the ids that a SuperLink draws
_DIGEST = "0" * 64
_NUMBER = 1.5  # a floating point number is as long whatever it says


@dataclass(frozen=True, slots=True)
class Line:
    """One part of what the SuperLink counts: bytes to sites and from sites."""

    name: str
    down: int
    up: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What we counted and can explain, and what the SuperLink counted."""

    lines: tuple[Line, ...]
    link: Line

    @property
    def ratio(self) -> float:
        """All that we can explain over what the SuperLink counted; 1 where nothing is left open."""
        return sum(line.down + line.up for line in self.lines) / (self.link.down + self.link.up)

    @property
    def ratio_without_envelopes(self) -> float:
        """What we count ourselves over what the SuperLink counted."""
        counted = self.lines[0]
        return (counted.down + counted.up) / (self.link.down + self.link.up)

    def table(self) -> str:
        """Return the explanation, line by line."""
        explained = Line("together", sum(line.down for line in self.lines), sum(line.up for line in self.lines))
        rows = (*self.lines, explained, self.link)
        head = f"{'bytes':<46} {'to sites':>12} {'from sites':>12}"
        return "\n".join((head, *(f"{row.name:<46} {row.down:>12} {row.up:>12}" for row in rows)))


def compare(events: Sequence[Event], status: RunStatus) -> Comparison:
    """Compare the log of a run with the SuperLink's counters of it.

    Holds for a run that was submitted once, with every message answered once: a resumed run is several to a SuperLink.
    """
    start, end = events[0], events[-1]
    sites = int(start["sites"])
    asked = sum(len(event["cohort"]) for event in events if event["event"] == "round")
    question = _message(RecordDict(), reply=False)
    # Where sizes are nobody's business the log has none, and any number is about as long.
    declared = start["declared_sizes"] or [(site, asked) for site in range(sites)]
    answers = [_message(Introduction(site, size, simulated=False).to_content(), reply=True) for site, size in declared]
    # The envelope of a train message holds the names of its three objects, whatever they weigh.
    train = _message(RecordDict({"fedsieve": ConfigRecord({"plan": b""})}), reply=False)
    trained = _message(RecordDict({"fedsieve": ConfigRecord({"update": b""})}), reply=True)
    lines = (
        Line("rounds, as Fedsieve counts them", PartBytes(**end["downlink"]).total, PartBytes(**end["uplink"]).total),
        Line(f"envelopes of {asked} plans and their replies", asked * _down(train, trained), asked * _up(trained)),
        Line(f"{sites} sites introduce themselves", sites * message_bytes(question), sum(map(message_bytes, answers))),
        Line("envelopes of that", sum(_down(question, answer) for answer in answers), sum(map(_up, answers))),
    )
    return Comparison(lines, Line("the SuperLink's counters", status.bytes_sent, status.bytes_received))


def _message(content: RecordDict, *, reply: bool) -> Message:
    """Return a message as long as a real one."""
    metadata = Metadata(
        run_id=_ID,
        message_id=_DIGEST,
        src_node_id=_ID if reply else SUPERLINK_NODE_ID,
        dst_node_id=SUPERLINK_NODE_ID if reply else _ID,
        reply_to_message_id=_DIGEST if reply else "",
        group_id="1",
        created_at=_NUMBER,
        ttl=_NUMBER,
        message_type="train",
    )
    return make_message(metadata=metadata, content=content)


def _objects(message: Message) -> int:
    tree, count = [get_object_tree(message)], 0
    while tree:
        count += 1
        tree.extend(tree.pop().children)
    return count


def _down(asked: Message, answered: Message) -> int:
    """Return the responses of the SuperLink around a message and the announcement of its reply."""
    fetched = PullMessagesResponse(
        messages_list=[message_to_proto(_bare(asked))], message_object_trees=[get_object_tree(asked)]
    )
    announced = PushMessagesResponse(
        reconnect=Reconnect(reconnect=5),
        results={_DIGEST: 0},
        objects_to_push=[_DIGEST] * _objects(answered),
        session_id=_DIGEST[:36],
    )
    return int(fetched.ByteSize() + announced.ByteSize())


def _up(answered: Message) -> int:
    """Return the requests of a node around a message and its reply."""
    node = Node(node_id=_ID)
    announced = PushMessagesRequest(
        node=node,
        messages_list=[message_to_proto(_bare(answered))],
        message_object_trees=[get_object_tree(answered)],
        clientapp_runtime_list=[_NUMBER],
    )
    return int(PullMessagesRequest(node=node).ByteSize() + announced.ByteSize())


def _bare(message: Message) -> Message:
    return make_message(metadata=message.metadata, content=RecordDict())
