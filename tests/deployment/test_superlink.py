"""What an operator asks of a SuperLink, and how long: before one that says what the test makes it say."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.common.serde import user_config_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from starlette.responses import Response

from common.errors import ConfigError, DeploymentError
from deployment import superlink
from deployment.keys import ServerKeys, SiteKeys
from deployment.processes import hold_port, port_of
from deployment.superlink import LinkUnreachable, NodeStatus, RunStatus, SuperLink
from tests.deployment.clock import Clock
from tests.deployment.servers import FakeLink, a_run

LOST = ("finished", "failed", "ServerApp process was lost")
COMPLETED = ("finished", "completed", "")


@pytest.fixture
def link(fake: FakeLink, keys: ServerKeys) -> SuperLink:
    return SuperLink(fake.address, keys.ca)


@pytest.fixture
def nobody(keys: ServerKeys) -> Iterator[SuperLink]:
    """A SuperLink that is away."""
    with hold_port() as held:
        yield SuperLink(f"localhost:{port_of(held)}", keys.ca)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(superlink, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def _bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "build_fab_from_disk", lambda app: f"bundle of {app}".encode())


def started(fake: FakeLink) -> list[tuple[bytes, dict[str, object]]]:
    """Return the bundle and the config of every run that was submitted."""
    asked = [one for one in fake.asked if isinstance(one, StartRunRequest)]
    return [(one.fab.content, user_config_from_proto(one.override_config)) for one in asked]


def test_runs_are_listed_the_latest_first(fake: FakeLink, link: SuperLink) -> None:
    early, late = "2026-01-01T08:00:00+00:00", "2026-01-02T07:00:00+00:00"
    fake.runs = {
        7: a_run(7, "finished", "failed", "why", pending_at=early, bytes_sent=10, bytes_recv=20),
        3: a_run(3, "running", pending_at=late, bytes_sent=1, bytes_recv=2),
    }
    first, last = RunStatus(3, "running", "", "", late, 1, 2), RunStatus(7, "finished", "failed", "why", early, 10, 20)
    assert link.runs() == [first, last]
    assert (first.finished, last.finished) == (False, True)
    assert link.run_status(7) == last
    with pytest.raises(DeploymentError, match=r"no run 8 at localhost:\d+: 'fedsieve deploy status' lists them"):
        link.run_status(8)


def test_nodes_are_listed_by_name(fake: FakeLink, link: SuperLink) -> None:
    fake.nodes = [
        NodeInfo(node_id=number, name=name, status="online") for number, name in [(3, "b"), (2, "b"), (9, "a")]
    ]
    assert link.nodes() == [NodeStatus(9, "a", "online"), NodeStatus(2, "b", "online"), NodeStatus(3, "b", "online")]


def test_a_node_is_registered_under_its_folders_name_or_another(
    fake: FakeLink, link: SuperLink, keys: ServerKeys, tmp_path: Path
) -> None:
    site = SiteKeys.create(tmp_path / "site-1", keys.ca, (), 1)
    assert link.register(site.public) == 77
    assert link.register(site.public, "hospital") == 77
    link.unregister(5)
    first, second, third = fake.asked
    assert (first.name, second.name, third.node_id) == ("site-1", "hospital", 5)
    assert first.public_key == public_key_to_bytes(load_ssh_public_key(site.public.read_bytes()))


def test_what_is_no_key_of_a_node_is_not_registered(fake: FakeLink, link: SuperLink, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the node's public key"):
        link.register(tmp_path / "none.pub")
    (tmp_path / "junk.pub").write_text("junk")
    with pytest.raises(ConfigError, match="cannot read the node's public key"):
        link.register(tmp_path / "junk.pub")
    other = Ed25519PrivateKey.generate().public_key()
    (tmp_path / "other.pub").write_bytes(other.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    with pytest.raises(ConfigError, match=r"expected the node.pub that 'fedsieve keys add-site' made"):
        link.register(tmp_path / "other.pub")
    assert not fake.asked


def test_a_run_is_submitted_stopped_and_its_whole_log_read(fake: FakeLink, link: SuperLink) -> None:
    fake.log = ["one\n", "two\n"]
    assert link.start(Path("/app"), {"rounds": 3, "private": True}) == 1
    assert started(fake) == [(b"bundle of /app", {"rounds": 3, "private": True})]
    assert list(link.logs(1)) == ["one\n", "two\n"]
    link.stop(1)
    _, logs, stop = fake.asked
    assert (logs.run_id, logs.after_timestamp, stop.run_id) == (1, 0.0, 1)


def test_a_run_is_seen_through(fake: FakeLink, link: SuperLink, clock: Clock) -> None:
    fake.fates = [[("pending", "", ""), ("running", "", ""), COMPLETED]]
    told: list[str] = []
    status = link.see_through(Path("/app"), {"rounds": 3}, tell=told.append)
    assert (status.run_id, status.outcome) == (1, "completed")
    assert told == ["run 1 submitted"]
    assert clock.slept == [1.0, 1.0]  # between two looks


def test_a_run_that_lost_its_server_app_is_submitted_again_with_restart(
    fake: FakeLink, link: SuperLink, clock: Clock
) -> None:
    fake.fates = [[LOST], [LOST], [COMPLETED]]
    told: list[str] = []
    assert link.see_through(Path("/app"), {"rounds": 3}, tell=told.append).run_id == 3
    again = (b"bundle of /app", {"rounds": 3, "restart": True})
    assert started(fake) == [(b"bundle of /app", {"rounds": 3}), again, again]
    assert told == [
        "run 1 submitted",
        "run 1 lost its ServerApp: ServerApp process was lost",
        "run 2 submitted again: it goes on from its checkpoint",
        "run 2 lost its ServerApp: ServerApp process was lost",
        "run 3 submitted again: it goes on from its checkpoint",
    ]


def test_five_attempts_are_enough(fake: FakeLink, link: SuperLink, clock: Clock) -> None:
    fake.fates = [[LOST] for _ in range(9)]
    with pytest.raises(DeploymentError, match="gave up after 5 attempts"):
        link.see_through(Path("/app"), {})
    assert len(started(fake)) == 5


@pytest.mark.parametrize(
    ("fate", "message"),
    [
        (
            ("finished", "failed", "ServerApp failed with exception: X"),
            "run 1 failed: ServerApp failed with exception: X; ",
        ),
        (("finished", "stopped", ""), "run 1 stopped: no details; 'fedsieve deploy logs 1' has more"),
        (("finished", "never heard of", "?"), "run 1 never heard of: [?]; "),
    ],
)
def test_what_was_the_runs_own_fault_is_not_tried_again(
    fake: FakeLink, link: SuperLink, clock: Clock, fate: tuple[str, str, str], message: str
) -> None:
    fake.fates = [[fate]]
    with pytest.raises(DeploymentError, match=message):
        link.see_through(Path("/app"), {})
    assert len(started(fake)) == 1


def test_a_superlink_that_is_away_is_waited_for(fake: FakeLink, link: SuperLink, clock: Clock) -> None:
    real, away = link.run_status, [True, True, False]

    def flickering(run_id: int) -> RunStatus:
        if away.pop(0):
            raise LinkUnreachable("away")
        return real(run_id)

    link.run_status = flickering  # type: ignore[method-assign]
    fake.fates = [[COMPLETED]]
    assert link.see_through(Path("/app"), {}).outcome == "completed"
    assert clock.slept == [0.5, 0.5]


def test_a_superlink_is_waited_for_as_long_as_asked_and_no_longer(nobody: SuperLink, clock: Clock) -> None:
    with pytest.raises(LinkUnreachable, match=r"no SuperLink answers at localhost:\d+: .*; is it running there\?"):
        nobody.wait_until_ready(2.0)
    assert clock.slept == [0.5] * 5  # the last try is after the two seconds
    assert not nobody.answers()


def test_a_superlink_is_waited_for_through_a_restart(nobody: SuperLink, clock: Clock) -> None:
    def away(app: Path, changes: object) -> int:
        raise LinkUnreachable("away")

    nobody.start = away  # type: ignore[method-assign]
    with pytest.raises(LinkUnreachable):
        nobody.see_through(Path("/app"), {})
    assert sum(clock.slept) == 300.5


def test_another_server_at_the_address_is_none(link: SuperLink, clock: Clock, tmp_path: Path) -> None:
    others = ServerKeys.create(tmp_path / "others", ("localhost",), 1)
    assert link.answers()
    stranger = SuperLink(link.address, others.ca)
    with pytest.raises(DeploymentError, match="its certificate is not of the given CA") as wrong:
        stranger.answers()
    assert not isinstance(wrong.value, LinkUnreachable)  # waiting does not help
    with pytest.raises(DeploymentError, match="its certificate is not of the given CA"):
        stranger.wait_until_ready(60)
    assert not clock.slept


def test_a_refusal_is_told_with_its_reason(fake: FakeLink, link: SuperLink) -> None:
    problem = {"code": 7, "public_message": "not so", "public_details": "since it is not"}
    fake.refusal = Response(json.dumps(problem), 403)
    with pytest.raises(DeploymentError, match=r"the SuperLink at localhost:\d+ refuses: 403 not so since it is not$"):
        link.nodes()
    fake.refusal = Response("x" * 600, 500)
    with pytest.raises(DeploymentError, match=r"refuses: 500 x{500}$"):
        link.nodes()


def test_what_is_no_ca_is_told(tmp_path: Path) -> None:
    (tmp_path / "junk.crt").write_text("junk")
    for bad in ("none.crt", "junk.crt"):
        with pytest.raises(ConfigError, match=f"cannot use the CA certificate .*{bad}"):
            SuperLink("localhost:1", tmp_path / bad)
