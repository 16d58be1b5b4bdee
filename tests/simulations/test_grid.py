"""Grids of simulated sites without Ray's processes: numbers of nodes and messages, streams of replies, dead actors."""

import os
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import ErrorCode

from common.errors import ConfigError, FederationError
from simulations import ray_grid, sites
from simulations.grid import InProcessGrid, site_of
from simulations.ray_grid import RayGrid, SiteActor, _cluster_at
from tests.support import small_config, small_dataset

NODES = [1000, 1001, 1002]


def messages(grid: Any, nodes: list[int]) -> list[Message]:
    content = RecordDict()
    return [grid.create_message(content, "train", node, "7", 60.0) for node in nodes]


def answer(message: Message, context: Context) -> Message:
    assert (context.run_id, context.node_config["num-partitions"], context.run_config) == (1, 3, {"a": 1})
    assert (message.metadata.group_id, message.metadata.message_type, message.metadata.ttl) == ("7", "train", 60.0)
    if context.node_config["partition-id"] == 1:
        raise ValueError("no memory")
    return Message(RecordDict(), reply_to=message)


def test_nodes_are_numbered_like_their_sites_and_messages_in_their_order() -> None:
    grid = InProcessGrid(answer, 3, {"a": 1})  # type: ignore[arg-type]
    assert grid.get_node_ids() == NODES and [site_of(node) for node in NODES] == [0, 1, 2]
    ids = grid.push_messages(messages(grid, NODES[:2]))
    assert ids == [f"{number:064x}" for number in (1, 2)]
    good, bad = grid.pull_messages(ids)
    assert (good.metadata.reply_to_message_id, bad.metadata.reply_to_message_id) == tuple(ids)
    assert (
        not good.has_error()
        and bad.error.reason == "ValueError: no memory"
        and bad.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    )
    assert grid.pull_messages(ids) == [], "each is given once"
    (other,) = grid.send_and_receive(messages(grid, NODES[2:]))
    assert other.metadata.reply_to_message_id == f"{3:064x}"
    with pytest.raises(NotImplementedError):
        grid.run  # noqa: B018


class Actor:
    """Stands for an actor: answers what it is asked, in bunches of two, until it dies."""

    def __init__(self, lives: int) -> None:
        self.lives, self.given, self.asked = lives, 0, 0
        self.answer = self
        self.where = SimpleNamespace(remote=lambda: f"node of {lives}")

    def options(self, num_returns: str) -> "Actor":
        assert num_returns == "streaming"
        return self

    def remote(self, content: RecordDict, envelopes: list[Any]) -> Iterator[list[Message]]:
        self.given += 1
        self.asked += len(envelopes)
        for start in range(0, len(envelopes), 2):
            if self.lives == 0:
                raise ray_grid.RayActorError
            self.lives -= 1
            asked = [ray_grid.make_message(metadata=one, content=content) for one in envelopes[start : start + 2]]
            yield [Message(RecordDict(), reply_to=message) for message in asked]


class Ray:
    """Stands for Ray: everything is here and ready, until ``late`` of its answers are waited for in vain."""

    def __init__(self, lives: list[int]) -> None:
        self.lives, self.late = lives, 0
        self.waited: list[float | None] = []
        self.killed: list[Any] = []
        self.started: list[Any] = []
        self.options: dict[str, object] = {}
        self.shutdowns = 0

    def put(self, value: object) -> object:
        return value

    def get(self, value: object) -> object:
        return value

    def wait(self, streams: list[Any], num_returns: int, timeout: float | None, fetch_local: bool) -> Any:
        assert num_returns == 1 and not fetch_local
        self.waited.append(timeout)
        if self.late:
            return [], streams
        return streams[:1], streams[1:]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def shutdown(self) -> None:
        self.shutdowns += 1

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0, "GPU": 1.0}

    def start(self, **options: object) -> Any:
        self.options = options

        def remote(*arguments: object) -> Actor:
            self.started.append(Actor(self.lives.pop(0)))
            return self.started[-1]

        return SimpleNamespace(remote=remote)


@pytest.fixture
def grid_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[..., tuple[RayGrid, Ray]]:
    def make(*lives: int, own: bool = True, **options: Any) -> tuple[RayGrid, Ray]:
        fake = Ray(list(lives))
        monkeypatch.setattr(ray_grid, "ray", fake)
        monkeypatch.setattr(ray_grid, "start_ray", lambda address: own)
        monkeypatch.setattr(ray_grid, "SiteActor", SimpleNamespace(options=fake.start))
        monkeypatch.setattr(ray_grid, "time", SimpleNamespace(monotonic=lambda: 100.0 + 2 * len(fake.waited)))
        return RayGrid(small_config(tmp_path, sites=5), small_dataset(), **options), fake

    return make


def test_replies_come_in_bunches_and_what_a_dead_actor_owed_is_asked_again(grid_of: Any) -> None:
    grid, fake = grid_of(1, 9, 9, gpus_per_actor=0.25)
    assert fake.options == {"num_cpus": 1.0, "num_gpus": 0.25, "scheduling_strategy": "SPREAD"}
    assert grid.actor_nodes == ["node of 1", "node of 9"]
    replies = grid.send_and_receive(messages(grid, [1000, 1001, 1002, 1003, 1004]), timeout=50.0)
    assert [reply.metadata.reply_to_message_id for reply in replies] == [f"{n:064x}" for n in range(1, 6)]
    assert not any(reply.has_error() for reply in replies) and fake.killed == []

    assert [actor.asked for actor in fake.started] == [3, 2, 1]
    assert fake.waited == [max(0.0, 50.0 - 2 * n) for n in range(len(fake.waited))]


def test_an_actor_that_dies_three_times_is_given_up(grid_of: Any) -> None:
    grid, fake = grid_of(0, 0, 0, 0, actors=1)
    (reply,) = grid.send_and_receive(messages(grid, [1003]))
    assert reply.error.reason == "the actor died 3 times while this site was waiting for it"
    assert [actor.given for actor in fake.started] == [1, 1, 1, 0] and fake.waited == [None] * 3


def test_after_a_deadline_busy_actors_are_replaced(grid_of: Any) -> None:
    grid, fake = grid_of(9, 9, 9, 9, 9)
    fake.late = True
    assert grid.send_and_receive(messages(grid, [1000, 1001]), timeout=1.0) == []
    assert fake.killed == fake.started[:2] and len(fake.started) == 4 and fake.waited == [1.0, 0.0]
    fake.late = False
    assert len(grid.send_and_receive(messages(grid, [1000]))) == 1 and len(fake.started) == 4
    assert [actor.given for actor in fake.started] == [0, 0, 1, 0], "nobody waits for the replaced ones"


@pytest.mark.parametrize("own", [True, False])
def test_what_was_started_is_stopped(own: bool, grid_of: Any) -> None:
    grid, fake = grid_of(9, 9, own=own)
    grid.close()
    assert (fake.shutdowns, fake.killed) == ((1, []) if own else (0, fake.started))
    with pytest.raises(IndexError):
        grid_of(9, own=own)  # the second actor does not start


def test_an_actor_answers_in_bunches_as_time_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    config, now = small_config(tmp_path, sites=3), [0.0]
    provided: list[Any] = []

    def run(app: object, message: Message, count: int, run_config: object) -> int:
        assert count == 3 and run_config == config.to_mapping()
        now[0] += 0.03
        return message.metadata.dst_node_id

    monkeypatch.setattr(ray_grid, "run_client_app", run)
    monkeypatch.setattr(ray_grid, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ray_grid, "keep_freed_memory", lambda: provided.append("memory"))
    monkeypatch.setattr(sites, "provide", provided.append)
    whole = sites.SimulatedSites.of(config, 3, small_dataset())
    made = SiteActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    actor = made(config.to_mapping(), small_dataset(), whole.shares)
    assert provided[0] == "memory" and provided[1].sizes == whole.sizes
    asked = messages(InProcessGrid(answer, 3, {}), [1, 2, 3, 4, 5])  # type: ignore[arg-type]
    assert list(actor.answer(RecordDict(), [one.metadata for one in asked])) == [[1, 2], [3, 4], [5]]
    assert list(actor.answer(RecordDict(), [one.metadata for one in asked[:2]])) == [[1, 2]]


def test_another_process_joins_a_cluster_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said = subprocess.CompletedProcess([], 0, "words of Ray h:1\n")
    asked: list[list[str]] = []

    def run(command: list[str], *, env: dict[str, str], capture_output: bool, text: bool) -> Any:
        assert "RAY_ADDRESS" not in env and env["PATH"] == os.environ["PATH"] and capture_output and text
        asked.append(command[-2:])
        return said

    monkeypatch.setattr(ray_grid, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    assert _cluster_at("auto", "RAY_ADDRESS") == "h:1"
    for printed, reason in ((" nobody there.\n", "nobody there"), ("", "it does not answer within 30 s")):
        said = subprocess.CompletedProcess([], 1, printed)
        with pytest.raises(ConfigError, match=rf"can join: {reason}\. Start one"):
            _cluster_at("a:1", "--ray-address")
    assert asked == [["auto", "30"], ["a:1", "30"], ["a:1", "30"]]
    with pytest.raises(ConfigError, match="a ray:// address needs Ray's client"):
        _cluster_at("ray://a:1", "--ray-address")


def test_sites_are_numbered_from_0_and_own_their_share(tmp_path: Any) -> None:
    config = small_config(tmp_path, sites=3)
    torch.set_num_threads(2)
    whole = sites.SimulatedSites.of(config, 3, small_dataset())
    assert torch.get_num_threads() == 1, "sums do not depend on the machine's cores"
    assert whole.sizes == [80, 80, 80] and whole.site(0).declared_size == whole.site(2).declared_size == 80
    for number in (-1, 3):
        with pytest.raises(FederationError, match=f"expected a site number from 0 to 2, got {number}"):
            whole.site(number)


def test_outside_a_simulation_no_site_is_made_up(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, sites=3)
    context = Context(1, 2, {"partition-id": 1, "num-partitions": 3}, RecordDict(), config.to_mapping())  # type: ignore[arg-type]
    monkeypatch.setattr(sites, "_provided", None)
    for module in (None, SimpleNamespace(is_initialized=lambda: False)):
        monkeypatch.setitem(sites.sys.modules, "ray", module)
        with pytest.raises(FederationError, match="start one with 'fedsieve site serve'"):
            sites.open_site(context)
    monkeypatch.setitem(sites.sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert sites.open_site(context).declared_size == 80
    sites.provide(sites.SimulatedSites.of(config, 2, small_dataset()))
    assert sites.open_site(context).declared_size == 120
