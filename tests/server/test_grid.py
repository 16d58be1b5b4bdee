"""The prompt grid, and nodes that go away in the middle of a round."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from client.app import app
from common.config import RunConfig
from server import app as server_app
from server import messages
from server.checkpoint import Checkpoint
from server.federation import Member
from server.grid import PromptGrid, is_away
from server.runlog import Event, read_events
from simulations import sites
from simulations.grid import InProcessGrid
from simulations.seeded import SeededRandomness
from tests.support import small_config

SUPERLINK = 1


class UnreliableGrid(InProcessGrid):
    """Loses the replies of one node in one round, as a SuperLink does whose SuperNode was killed after it was asked."""

    def __init__(self, config: RunConfig, lost_round: int, *, comes_back: bool = True) -> None:
        sites.provide(sites.SimulatedSites.of(config, config.sites))
        super().__init__(app, config.sites, config.to_mapping())
        self._victim = super().get_node_ids()[1]
        self._lost_round, self._comes_back = lost_round, comes_back
        self._gone = False
        self.asked: list[int] = []

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if not self._gone or node != self._victim]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._delivered(reply) for reply in super().pull_messages(message_ids)]

    def _delivered(self, reply: Message) -> Message:
        if reply.metadata.src_node_id != self._victim:
            return reply
        self.asked.append(int(reply.metadata.group_id or 0))
        if self.asked.count(self._lost_round) != 1 and not self._gone:
            return reply
        self._gone = not self._comes_back
        metadata = Metadata(
            run_id=1,
            message_id="",
            src_node_id=SUPERLINK,
            dst_node_id=SUPERLINK,
            reply_to_message_id=reply.metadata.reply_to_message_id,
            group_id=reply.metadata.group_id,
            created_at=reply.metadata.created_at,
            ttl=60.0,
            message_type="train",
        )
        return make_message(metadata=metadata, error=Error(ErrorCode.NODE_UNAVAILABLE, "gone"))


def run(grid: InProcessGrid, config: RunConfig) -> tuple[bytes, list[Event]]:
    result = server_app.run(PromptGrid(grid), config, (), lambda number: SeededRandomness(1, 99).for_round("", number))
    events = [event for event in read_events(result.folder / "run.jsonl") if event["event"] == "round"]
    return Checkpoint.load(result.folder / "checkpoint.npz").model.tobytes(), events


def test_a_node_that_comes_back_is_asked_again_in_the_same_round(tmp_path: Path) -> None:
    config = small_config(tmp_path / "whole", rounds=3, sites=3, noise_multiplier=3.0)
    whole, _ = run(UnreliableGrid(config, lost_round=99), config)
    config = small_config(tmp_path / "lost", rounds=3, sites=3, noise_multiplier=3.0)
    grid = UnreliableGrid(config, lost_round=2)
    model, rounds = run(grid, config)
    assert grid.asked == [0, 1, 2, 2, 3]
    assert [len(event["rejections"]) for event in rounds] == [0, 0, 0]
    assert model == whole
    # The second question has travelled, too.
    assert sum(rounds[1]["downlink"].values()) > 1.2 * sum(rounds[2]["downlink"].values())


def test_a_node_that_stays_away_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[list[Member]] = []

    def returned(grid: Grid, away: list[Member], deadline: float) -> list[Member]:
        waits.append(wait_for(grid, away, deadline))
        return waits[-1]

    wait_for = messages._returned
    monkeypatch.setattr(messages, "_returned", returned)
    monkeypatch.setattr(messages, "_PATIENCE", 0.1)
    config = small_config(tmp_path, rounds=4, sites=3, noise_multiplier=3.0)
    grid = UnreliableGrid(config, lost_round=2, comes_back=False)
    _, rounds = run(grid, config)
    assert [event["admitted"] for event in rounds] == [3, 2, 2, 2]
    assert waits == [[]]
    assert "gone" in rounds[3]["rejections"][0]["reason"]


def test_replies_of_the_superlink_are_told_from_those_of_a_node() -> None:
    config = small_config(Path("unused"), rounds=1, sites=2)
    grid = UnreliableGrid(config, lost_round=0)
    nodes = grid.get_node_ids()
    replies = PromptGrid(grid).send_and_receive([Message(RecordDict(), node, "query") for node in nodes], timeout=10)
    assert {reply.metadata.src_node_id: is_away(reply) for reply in replies} == {nodes[0]: False, nodes[1]: True}
