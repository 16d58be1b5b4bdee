"""Sites that answer nonsense: each reply is rejected with a reason, and the model is the same as without it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client.app import introduce, train
from common import coding
from common.config import RunConfig
from common.errors import NothingLearned
from common.models import initial_vector
from common.records import Release, Request, parse_answer
from server.app import RunResult, run
from server.checkpoint import Checkpoint
from server.runlog import read_events
from simulations import sites
from simulations.grid import InProcessGrid
from tests.support import small_config, small_dataset

POISONED = 2
Poison = Callable[[bytes, Request], bytes]


def app_with(poison: Poison | None) -> ClientApp:
    """Return the real ClientApp, whose site 2 has its releases tampered with; without poison it does not answer."""
    app = ClientApp()
    app.query()(introduce)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        reply = train(message, context)
        if context.node_config["partition-id"] != POISONED:
            return reply
        if poison is None:
            raise RuntimeError("absent")
        release = parse_answer(reply.content)
        assert isinstance(release, Release)
        request = Request.from_content(message.content)
        return Message(Release(poison(release.update, request)).to_content(), reply_to=message)

    return app


def half_dense(out: Path) -> RunConfig:
    return small_config(out, final_density=0.5, value_coding="f32")


def run_with(config: RunConfig, poison: Poison | None) -> RunResult:
    sites.provide(sites.SimulatedSites.of(config, config.sites, small_dataset()))
    return run(InProcessGrid(app_with(poison), config.sites, config.to_mapping()), config)


def rewritten(change: Callable[[coding.SparseUpdate], dict[str, object]]) -> Poison:
    def poison(update: bytes, request: Request) -> bytes:
        decoded = coding.decode(update, size=131, max_kept=131, value_coding="f32")
        fields = {name: getattr(decoded, name) for name in decoded.__slots__}
        return coding.encode(coding.SparseUpdate(**{**fields, **change(decoded)}), "f32")  # type: ignore[arg-type]

    return poison


POISONS: dict[str, tuple[Poison, str]] = {
    "nan": (rewritten(lambda u: {"values": np.full_like(u.values, np.nan)}), "not finite"),
    "one infinity": (rewritten(lambda u: {"values": np.append(u.values[1:], np.float32(np.inf))}), "not finite"),
    "wrong length": (rewritten(lambda u: {"values": u.values[:-1]}), "values, got"),
    "stale round": (rewritten(lambda u: {"round": u.round - 1}), "expected an answer to round"),
    "stale model": (rewritten(lambda u: {"model_version": u.model_version + 1}), "expected model version"),
    "other mask": (rewritten(lambda u: {"mask_digest": u.mask_digest ^ 1}), "another mask"),
    "ten times the size": (rewritten(lambda u: {"values": np.tile(u.values, 10)}), "at most"),
    "random bytes": (lambda update, request: np.random.default_rng(1).bytes(len(update)), "start with"),
    "the model itself": (lambda update, request: request.model, "expected"),
    "empty": (lambda update, request: b"", "at least 40 bytes"),
}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_with(half_dense(tmp_path_factory.mktemp("without")), None)


@pytest.mark.parametrize("kind", POISONS)
def test_a_poisoned_reply_is_rejected_and_changes_nothing(kind: str, without: RunResult, tmp_path: Path) -> None:
    poison, reason = POISONS[kind]
    result = run_with(half_dense(tmp_path), poison)
    assert result.model.tobytes() == without.model.tobytes()
    rounds = [event for event in read_events(result.folder / "run.jsonl") if event["event"] == "round"]
    assert [event["admitted"] for event in rounds] == [5] * 4
    for event in rounds:
        (rejection,) = event["rejections"]
        assert rejection["site"] == POISONED and reason in rejection["reason"]


def test_the_poison_matters(without: RunResult, tmp_path: Path) -> None:
    """An update that only looks right does change the model: the comparison above can fail."""
    result = run_with(half_dense(tmp_path), lambda update, request: update)
    assert result.model.tobytes() != without.model.tobytes()


def test_a_second_reply_of_the_same_site_does_not_count(tmp_path: Path) -> None:
    class Repeating(InProcessGrid):
        def pull_messages(self, message_ids: object) -> list[Message]:
            replies = super().pull_messages(message_ids)  # type: ignore[arg-type]
            trained = [reply for reply in replies if reply.metadata.message_type == "train"]
            return [*replies, *trained[:1]]

    config = half_dense(tmp_path)
    sites.provide(sites.SimulatedSites.of(config, config.sites, small_dataset()))
    app = ClientApp()
    app.query()(introduce)
    app.train()(train)
    twice = run(Repeating(app, config.sites, config.to_mapping()), config)
    once = run(InProcessGrid(app, config.sites, config.to_mapping()), config)
    assert twice.model.tobytes() == once.model.tobytes()
    events = [event for event in read_events(twice.folder / "run.jsonl") if event["event"] == "round"]
    assert all(e["rejections"] == [{"site": 0, "reason": "a second reply to the same round"}] for e in events)


def test_too_few_replies_abandon_the_round_and_leave_the_model(tmp_path: Path) -> None:
    config = small_config(tmp_path, name="x", min_cohort=6, rounds=2, value_coding="f32", downlink_coding="f32")
    with pytest.raises(NothingLearned, match="round 1, site 2: the update has values that are not finite"):
        run_with(config, POISONS["nan"][0])
    initial = initial_vector(config.model, config.seed)
    assert Checkpoint.load(tmp_path / "x" / "checkpoint.npz").model.tobytes() == initial.tobytes()
    rounds = [event for event in read_events(tmp_path / "x" / "run.jsonl") if event["event"] == "round"]
    assert [event["abandoned"] for event in rounds] == [True, True]
    assert rounds[-1]["epsilon"] > 0  # what was released was spent, whether it was of use or not
