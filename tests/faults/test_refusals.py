"""Sites that refuse: the run goes on, and a refusal costs them nothing."""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client.app import introduce, train
from common.records import Refusal
from server.app import run
from server.runlog import read_events
from simulations import sites
from simulations.grid import InProcessGrid
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
