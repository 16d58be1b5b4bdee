"""Sites that refuse: the run goes on, and a refusal costs them nothing."""

import contextlib
from pathlib import Path

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client.app import introduce, train
from common.errors import FederationError
from common.plan import RoundPlan
from common.records import Refusal, Request
from server.app import run
from server.runlog import Event, read_events
from simulations import sites
from simulations.grid import InProcessGrid
from simulations.run import config_of_run
from tests.support import small_config, small_dataset


def test_a_refusal_is_logged_and_not_charged(tmp_path: Path) -> None:
    app = ClientApp()
    app.query()(introduce)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            return Message(Refusal("my budget is spent").to_content(), reply_to=message)
        return train(message, context)

    config = small_config(tmp_path)
    sites.provide(sites.SimulatedSites.of(config, config.sites, small_dataset()))
    result = run(InProcessGrid(app, config.sites, config.to_mapping()), config)
    events = list(read_events(result.folder / "run.jsonl"))
    assert events[1]["rejections"] == [{"site": 1, "reason": "refused: my budget is spent"}]
    rows = {row["site"]: row for row in events[-1]["sites"]}
    assert rows[1]["epsilon"] == 0.0 and rows[1]["rejected"] == 4
    assert rows[0]["epsilon"] > 7 and rows[0]["admitted"] == 4


def app_that_refuses(sites_that_do: set[int], from_round: int) -> ClientApp:
    app = ClientApp()
    app.query()(introduce)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        number = RoundPlan.from_bytes(Request.from_content(message.content).plan).round
        if context.node_config["partition-id"] in sites_that_do and number >= from_round:
            return Message(Refusal("over my budget", for_good=True).to_content(), reply_to=message)
        return train(message, context)

    return app


def test_a_site_that_refuses_for_good_is_not_asked_again(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    sites.provide(sites.SimulatedSites.of(config, config.sites, small_dataset()))
    result = run(InProcessGrid(app_that_refuses({1, 4}, 2), config.sites, config.to_mapping()), config)
    events = list(read_events(result.folder / "run.jsonl"))
    assert [event["cohort"] for event in events[1:-1]] == [[0, 1, 2, 3, 4, 5]] * 2 + [[0, 2, 3, 5]] * 2
    rows = {row["site"]: row for row in events[-1]["sites"]}
    assert rows[1]["dropped"] == "refused: over my budget" and rows[0]["dropped"] is None
    assert (rows[1]["admitted"], rows[1]["rejected"]) == (1, 1)
    assert 0 < rows[1]["epsilon"] < rows[0]["epsilon"]


def test_a_resumed_run_does_not_ask_them_again_unless_it_could_not_go_on(tmp_path: Path) -> None:
    def events_after_resuming(min_cohort: int, refusing: ClientApp) -> list[Event]:
        config = small_config(tmp_path / str(min_cohort), name="x", min_cohort=min_cohort)
        sites.provide(sites.SimulatedSites.of(config, config.sites, small_dataset()))
        with contextlib.suppress(KeyboardInterrupt, FederationError):
            run(InProcessGrid(refusing, config.sites, config.to_mapping()), config, (stop_in_round_3,))
        again = config_of_run(Path(config.out) / "x")
        result = run(InProcessGrid(train_app, config.sites, config.to_mapping()), again)
        return list(read_events(result.folder / "run.jsonl"))

    def stop_in_round_3(event: Event) -> None:
        if event["event"] == "round" and event["round"] == 3:  # before its checkpoint
            raise KeyboardInterrupt

    train_app = app_that_refuses(set(), 1)
    kept_out = [event for event in events_after_resuming(1, app_that_refuses({1, 4}, 2)) if event["event"] == "round"]
    assert [event["cohort"] for event in kept_out[-2:]] == [[0, 2, 3, 5]] * 2
    needed = [event for event in events_after_resuming(5, app_that_refuses({1, 4}, 2)) if event["event"] == "round"]
    assert needed[-1]["cohort"] == [0, 1, 2, 3, 4, 5]


def test_a_run_ends_when_too_few_sites_are_left(tmp_path: Path) -> None:
    config = small_config(tmp_path, name="x", min_cohort=5)
    sites.provide(sites.SimulatedSites.of(config, config.sites, small_dataset()))
    with pytest.raises(
        FederationError, match=r"4 of 6 sites still take part.*min-cohort=5; the others refused: over my"
    ):
        run(InProcessGrid(app_that_refuses({1, 4}, 2), config.sites, config.to_mapping()), config)
    assert (tmp_path / "x" / "checkpoint.npz").exists()
