"""A round's messages and replies, under a clock of the test: who is waited for, asked again, counted and rejected."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from common import coding
from common.coding import PartBytes, SparseUpdate
from common.records import ModelWanted, Refusal, Release, message_bytes
from server import federation, grid, messages
from server.admission import Rejection, admit, wants_model
from server.app import _ask_again_if_needed
from server.federation import Member, join
from server.grid import PromptGrid
from server.messages import RoundMessages
from server.open_round import OpenRound
from server.state import SiteCounts
from server.traffic import Traffic
from tests.support import small_plan

PLAN = small_plan(100, round=5, model_version=4)
UPDATE = coding.encode(SparseUpdate(5, 4, PLAN.mask.digest(), 100, np.zeros(50, np.float32)), "f32")
MEMBERS = [Member(site, 100 + site, 10, simulated=True) for site in range(3)]


@dataclass
class Clock:
    """Stands for the module ``time``: nothing passes but what is slept."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (grid, messages, federation):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Nodes:
    """A grid whose replies come at given times; ``there`` says at a time which nodes are."""

    def __init__(self, clock: Clock, replies: list[tuple[float, Message]] = [], there: Any = lambda now: []) -> None:  # noqa: B006
        self.clock, self.replies, self.there = clock, list(replies), there
        self.sent: list[Message] = []

    def push_messages(self, sent: Iterable[Message]) -> list[str | None]:
        self.sent = list(sent)
        return [message.metadata.message_id or None for message in self.sent]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        come = [reply for at, reply in self.replies if at <= self.clock.now]
        self.replies = [(at, reply) for at, reply in self.replies if at > self.clock.now]
        return come

    def get_node_ids(self) -> list[int]:
        return list(self.there(self.clock.now))

    def send_and_receive(self, sent: list[Message], timeout: float) -> list[Message]:
        self.sent, self.timeout = list(sent), timeout
        return []


def question(node_id: int, name: str) -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(RecordDict(), node_id, "train")
    message.metadata.__dict__["_message_id"] = name
    return message


def reply_to(node_id: int, content: RecordDict | Error, name: str = "") -> Message:
    return Message(content, reply_to=question(node_id, name))  # type: ignore[arg-type]


def test_replies_are_looked_for_often_and_then_every_second(clock: Clock) -> None:
    sent = [question(101, "a"), question(102, "b"), question(103, "")]  # the last was not taken: nobody will reply
    late, stranger = reply_to(102, RecordDict(), "b"), reply_to(105, RecordDict(), "of another round")
    nodes = Nodes(clock, [(0.0, reply_to(101, RecordDict(), "a")), (0.3, stranger), (3.0, late)])
    replies = PromptGrid(nodes).send_and_receive(sent, timeout=60)  # type: ignore[arg-type]
    assert [reply.metadata.src_node_id for reply in replies] == [101, 102]
    assert clock.slept == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    nodes = Nodes(clock, [(clock.now + 5.0, late)])
    assert PromptGrid(nodes).send_and_receive(sent[1:2], timeout=4) == []  # type: ignore[arg-type]
    assert PromptGrid(nodes).send_and_receive(sent[1:2]) == [late]  # type: ignore[arg-type]


def test_what_the_superlink_says_in_the_place_of_a_node_is_put_under_that_node(clock: Clock) -> None:
    from_superlink = reply_to(102, Error(ErrorCode.NODE_UNAVAILABLE, "gone"), "b")
    from_superlink.metadata.__dict__["_src_node_id"] = 1
    nodes = Nodes(clock, [(0.0, from_superlink)])
    (reply,) = PromptGrid(nodes).send_and_receive([question(102, "b")])  # type: ignore[arg-type]
    assert reply.metadata.src_node_id == 102
    nodes.set_run = lambda run: setattr(nodes, "run", run)  # type: ignore[attr-defined]
    grid = PromptGrid(nodes)  # type: ignore[arg-type]
    grid.set_run("a run")  # type: ignore[arg-type]
    assert grid.run == "a run"


def test_nodes_that_join_are_looked_for_until_the_time_is_up(clock: Clock) -> None:
    nodes = Nodes(clock, there=lambda now: [1, 2] if now < 5 else [1, 2, 3])
    with pytest.raises(federation.FederationError, match="within 4 s, got 2"):
        join(nodes, 3, timeout=4)  # type: ignore[arg-type]
    assert 4 <= clock.now < 5
    with pytest.raises(federation.FederationError, match="only 0 introduced themselves"):
        join(nodes, 3, timeout=4)  # type: ignore[arg-type]
    assert [message.metadata.dst_node_id for message in nodes.sent] == [1, 2, 3]
    assert nodes.timeout == 4 and {message.metadata.ttl for message in nodes.sent} == {4}


class Models:
    """Stands for the downlink: site 2 holds another model than the others."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self.models = [b"same", b"same", b"other!"]
        self.models[1] = self.models[0]

    def bytes_for(self, site: int) -> bytes:
        return self.models[site]

    def parts_of(self, model: bytes) -> PartBytes:
        return PartBytes(values=len(model))

    def forget(self, site: int) -> None:
        self.forgotten.append(site)


def asking(clock: Clock, signer: Any = None) -> tuple[RoundMessages, OpenRound, Traffic, Models]:
    traffic, models = Traffic(100), Models()
    of_round = RoundMessages(downlink=models, signer=signer, traffic=traffic, round_deadline=100.0)  # type: ignore[arg-type]
    current = OpenRound(PLAN, MEMBERS, clock.now, frozenset({100, 101, 102}))
    return of_round, current, traffic, models


def test_sites_that_hold_the_same_model_share_a_content_and_every_byte_is_counted(clock: Clock) -> None:
    signer = SimpleNamespace(sign=lambda plan: b"s" * 64)
    of_round, current, traffic, _ = asking(clock, signer)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    sent = of_round.address(current, MEMBERS, ttl=70.0)
    assert [(m.metadata.dst_node_id, m.metadata.ttl, m.metadata.group_id) for m in sent] == [
        (100, 70.0, "5"),
        (101, 70.0, "5"),
        (102, 70.0, "5"),
    ]
    assert sent[0].content is sent[1].content and sent[0].content is not sent[2].content
    first = traffic.sites[0].downlink
    assert (first.values, first.header) == (4, len(PLAN.to_bytes()) + 64)
    assert [traffic.sites[site].downlink.total for site in range(3)] == [message_bytes(message) for message in sent]
    assert traffic.downlink.dense == 3 * 400
    of_round.address(current, MEMBERS[:1], ttl=70.0, again=True)
    assert traffic.downlink.dense == 3 * 400 and traffic.sites[0].downlink.total == 2 * first.total


def gone(node_id: int) -> Message:
    return reply_to(node_id, Error(ErrorCode.NODE_UNAVAILABLE, "gone"))


@pytest.mark.parametrize(("now", "asked"), [(0.0, [101, 100]), (79.0, [101, 100]), (80.0, [])])
def test_who_wants_the_whole_model_or_comes_back_is_asked_once_more_if_there_is_time(
    clock: Clock, now: float, asked: list[int]
) -> None:
    of_round, current, traffic, models = asking(clock)
    clock.now = now
    nodes = Nodes(clock, there=lambda at: [100, 101, 102])
    wanted, failed = reply_to(101, ModelWanted().to_content()), reply_to(102, Error(1, "boom"))
    rest = list(of_round.answers_in_full(current, nodes, [gone(100), wanted, failed], deadline=100.0))  # type: ignore[arg-type]
    assert rest == [failed]
    assert [message.metadata.dst_node_id for message in nodes.sent] == asked
    assert models.forgotten == [1] and traffic.uplink.dense == 0
    assert traffic.sites[1].uplink == PartBytes(framing=message_bytes(wanted))
    if asked:
        assert nodes.timeout == 100.0 - now and not current.rejections
        assert traffic.downlink.dense == 0  # with dense float32 nobody would be asked again
    else:
        assert current.rejections == {1: Rejection("wanted the whole model too late in the round", spent=False)}


@pytest.mark.parametrize(
    ("back_at", "deadline", "waited"),
    [(0.0, 100.0, 0.0), (3.2, 100.0, 3.5), (500.0, 100.0, 80.0), (500.0, 500.0, 90.0)],
)
def test_a_node_that_went_away_is_waited_for_as_long_as_the_round_can_wait(
    clock: Clock, back_at: float, deadline: float, waited: float
) -> None:
    of_round, current, _, _ = asking(clock)
    nodes = Nodes(clock, there=lambda now: [100] if now >= back_at else [])
    assert not list(of_round.answers_in_full(current, nodes, [gone(100)], deadline))  # type: ignore[arg-type]
    assert clock.now == waited
    assert [message.metadata.dst_node_id for message in nodes.sent] == ([100] if back_at < 80 else [])
    current.present = frozenset({101})  # a node that was never there is not waited for
    assert len(list(of_round.answers_in_full(current, nodes, [gone(100)], deadline))) == 1  # type: ignore[arg-type]


def test_a_failure_is_told_by_the_end_of_its_last_line() -> None:
    verdict = admit(reply_to(100, Error(1, "Traceback\n" + "x" * 1000 + "\n")), PLAN, 10)
    assert verdict == Rejection("the site failed: " + "x" * 300)
    refused = admit(reply_to(100, Refusal("never", True).to_content()), PLAN, 10)
    assert refused == Rejection("refused: never", spent=False, for_good=True)
    wanted = admit(reply_to(100, ModelWanted().to_content()), PLAN, 10)
    assert wanted == Rejection("the site asked for the whole model twice", spent=False)


def test_one_update_of_a_site_counts_and_the_others_are_told() -> None:
    traffic = Traffic(100)
    current = OpenRound(PLAN, MEMBERS, 0.0, frozenset())
    update = reply_to(100, Release(UPDATE).to_content())
    refusal = reply_to(101, Refusal("never", True).to_content())
    for member, reply in ((MEMBERS[0], update), (MEMBERS[0], update), (MEMBERS[1], refusal)):
        current.take_reply(member, reply, traffic)
    current.reject_silent(60.0)
    assert {site: rejection.reason for site, rejection in current.rejections.items()} == {
        0: "a second reply to the same round",
        1: "refused: never",
        2: "no reply within 60 s",
    }
    assert [current.has_refused(site) for site in (0, 1, 2, 3)] == [False, True, False, False]
    assert traffic.uplink.dense == 400 and traffic.sites[0].uplink.total == 2 * message_bytes(update)
    assert traffic.sites[0].uplink.values == 400 and traffic.sites[1].uplink.framing == message_bytes(refusal)
    counts = {site: SiteCounts() for site in range(3)}
    current.count_in(SimpleNamespace(counts_of=counts.__getitem__))  # type: ignore[arg-type]
    assert counts == {0: SiteCounts(1, 0), 1: SiteCounts(0, 1, "refused: never"), 2: SiteCounts(0, 1)}
    assert current.outcome()["admitted"] == 1 and current.outcome()["density"] == 0.5
    spent = current.bytes_spent(traffic)
    assert spent["bits_per_value"] == 32.0 and spent["dense_uplink"] == 400
    assert spent["bits_per_parameter"] == round(8 * traffic.round_uplink.parts.total / (100 * 3), 4)


def test_a_site_that_has_released_has_not_refused() -> None:
    current = OpenRound(PLAN, MEMBERS, 0.0, frozenset())
    current.take_reply(MEMBERS[0], reply_to(100, Release(UPDATE).to_content()), Traffic(100))
    current.rejections[0] = Rejection("it says now that it refuses", spent=False)
    assert not current.has_refused(0)


def test_what_is_no_answer_wants_no_model() -> None:
    contents = (ModelWanted().to_content(), Refusal("no").to_content(), RecordDict(), Error(1, "boom"))
    assert [wants_model(reply_to(100, content)) for content in contents] == [True, False, False, False]


@pytest.mark.parametrize(("min_cohort", "asked_again"), [(2, False), (3, True)])
def test_sites_that_had_refused_are_asked_again_where_a_run_cannot_go_on(min_cohort: int, asked_again: bool) -> None:
    state = SimpleNamespace(counts={0: SiteCounts(4, 1, "refused"), 1: SiteCounts(5, 0)})
    _ask_again_if_needed(state, SimpleNamespace(min_cohort=min_cohort), MEMBERS)  # type: ignore[arg-type]
    assert state.counts == {0: SiteCounts(4, 1, "" if asked_again else "refused"), 1: SiteCounts(5, 0)}
