import subprocess
import sys
from types import SimpleNamespace

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client.app import _site_opener, app
from client.channel import Access
from common.errors import FederationError
from common.models import initial_vector
from common.records import Introduction, Refusal, Release, Request, parse_answer
from simulations import sites
from simulations.run import config_with
from tests.support import SMALL_MODEL, small_config, small_request


def context_of(site: int | None) -> Context:
    config = small_config("unused")  # type: ignore[arg-type]
    node_config = {} if site is None else {"partition-id": site, "num-partitions": 6}
    return Context(1, 2, node_config, RecordDict(), dict(config.to_mapping()))


def message_of(content: RecordDict, kind: str) -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    return Message(content, 2, kind)


@pytest.fixture(autouse=True)
def simulated_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("unused")  # type: ignore[arg-type]
    monkeypatch.setattr(sites, "_provided", sites.SimulatedSites.of(config, config.sites))


def test_a_site_introduces_itself() -> None:
    reply = app(message_of(RecordDict(), "query"), context_of(4))
    assert Introduction.from_content(reply.content) == Introduction(site=4, declared_size=40, simulated=True)


def test_a_plan_is_carried_out() -> None:
    start = initial_vector(SMALL_MODEL, 1)
    request = Request(*small_request(start))
    answer = parse_answer(app(message_of(request.to_content(), "train"), context_of(0)).content)
    assert isinstance(answer, Release)


def test_what_cannot_be_carried_out_is_refused_with_the_reason() -> None:
    for content in (RecordDict(), Request(b"junk", b"").to_content()):
        answer = parse_answer(app(message_of(content, "train"), context_of(0)).content)
        assert isinstance(answer, Refusal)
        assert "expected" in answer.reason or "JSON" in answer.reason


def test_a_node_without_a_daemon_does_not_play_a_simulated_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "_provided", None)
    with pytest.raises(FederationError, match="fedsieve site serve"):
        app(message_of(RecordDict(), "query"), context_of(4))


@pytest.mark.parametrize("lacks", ["partition-id", "num-partitions"])
def test_a_node_without_a_place_among_the_sites_is_none(lacks: str) -> None:
    context = context_of(4)
    context.node_config[lacks] = "4"
    with pytest.raises(FederationError, match="expected 'partition-id' and 'num-partitions' in the node config"):
        app(message_of(RecordDict(), "query"), context)


@pytest.mark.parametrize("site", [-1, 6])
def test_a_site_that_does_not_exist(site: int) -> None:
    with pytest.raises(FederationError, match=f"expected a site number from 0 to 5, got {site}"):
        app(message_of(RecordDict(), "query"), context_of(site))


def test_flowers_own_engine_opens_the_sites_of_the_run_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "_provided", None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(FederationError, match="simulated sites, whose noise is seeded, do not stand in"):
        app(message_of(RecordDict(), "query"), context_of(4))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    reply = app(message_of(RecordDict(), "query"), context_of(5))
    assert Introduction.from_content(reply.content) == Introduction(site=5, declared_size=40, simulated=True)


def test_the_shim_imports_no_torch() -> None:
    code = "import sys, client.app; assert not {'torch', 'opacus', 'ray'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_defaults_are_valid_for_flower() -> None:
    # Flower's bundle refuses run-config values of any other type.
    assert all(isinstance(value, bool | int | float | str) for value in config_with({}).to_mapping().values())


def test_a_node_with_a_daemon_asks_it_for_as_long_as_the_message_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Remote:
        declared_size = 40

        def __init__(self, access: Access, patience: float) -> None:
            waits.append(patience)

    monkeypatch.setattr("client.remote.RemoteSite", Remote)
    context, question = context_of(4), message_of(RecordDict(), "query")
    context.node_config["site"] = "unix:/run/site.sock"
    question.metadata.ttl = 1000.0
    assert Introduction.from_content(app(question, context).content) == Introduction(4, 40, simulated=False)
    assert 500 < waits[0] <= 1000
    for wrong in (-1, "4"):
        context.node_config["partition-id"] = wrong
        with pytest.raises(FederationError, match="expected 'partition-id' >= 0"):
            app(question, context)


def test_a_node_on_which_nothing_opens_sites_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.app.entry_points", lambda group: [])
    _site_opener.cache_clear()
    with pytest.raises(FederationError, match="install fedsieve here"):
        app(message_of(RecordDict(), "query"), context_of(4))
