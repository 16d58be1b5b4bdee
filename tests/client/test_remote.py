"""How a shim reaches its site: where TLS is asked for, how long it waits, and what it makes of every answer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from client import channel, remote
from client.channel import Access
from client.remote import RemoteSite
from client.rpc import site_pb2 as messages
from common.errors import ConfigError, DaemonStopped, ModelMissing, PlanRefused, SiteUnreachable, WireError
from deployment import gate

UPDATE = messages.TrainReply(update=b"update")
STEP = messages.TrainReply(progress=messages.Progress(steps_done=1, steps=3))


class Answering:
    """Stands for the stub of every connection: what it was asked, and how long it was waited for."""

    def __init__(self, *answers: list[messages.TrainReply] | Exception) -> None:
        self.answers, self.connects, self.asked = list(answers), [], []

    @contextmanager
    def stub(self, connect_seconds: float | None = None) -> Iterator[Any]:
        self.connects.append(connect_seconds)
        yield SimpleNamespace(Train=self.train)

    def train(self, request: messages.TrainRequest, metadata: Any, timeout: float | None) -> list[messages.TrainReply]:
        self.asked.append((request, timeout))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def site_with(answering: Answering, monkeypatch: pytest.MonkeyPatch, patience: float | None = None) -> RemoteSite:
    site = RemoteSite(Access(address="unix:/nowhere"), patience)
    monkeypatch.setattr(site, "_stub", answering.stub)
    return site


def test_a_daemon_that_stops_in_the_middle_is_asked_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering(DaemonStopped("away"), [STEP, UPDATE])
    assert site_with(answering, monkeypatch).train(b"plan", b"model", b"signature") == b"update"
    assert answering.asked == [(messages.TrainRequest(plan=b"plan", model=b"model", signature=b"signature"), None)] * 2
    assert answering.connects == [remote._CONNECT_SECONDS, remote._RESTART_SECONDS]
    answering = Answering(DaemonStopped("away"), DaemonStopped("away"))
    with pytest.raises(DaemonStopped):
        site_with(answering, monkeypatch).train(b"", b"", b"")


def test_nobody_waits_longer_than_the_message_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering([UPDATE], [UPDATE])
    site_with(answering, monkeypatch, patience=1000.0).train(b"", b"", b"")
    site_with(answering, monkeypatch, patience=-5.0).train(b"", b"", b"")
    (_, left), (_, none) = answering.asked
    assert 500 < left <= 1000 and none == 0


@pytest.mark.parametrize(
    ("reply", "error", "match"),
    [
        (messages.TrainReply(refusal=messages.Refusal(reason="too much", for_good=True)), PlanRefused, "too much"),
        (messages.TrainReply(damaged="junk"), WireError, "junk"),
        (messages.TrainReply(model_wanted=True), ModelMissing, "does not hold"),
        (STEP, SiteUnreachable, "ended its answer without an update"),
    ],
)
def test_what_is_no_update_is_raised_as_at_the_site(
    reply: messages.TrainReply, error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=match) as raised:
        site_with(Answering([reply]), monkeypatch).train(b"", b"", b"")
    assert getattr(raised.value, "for_good", True)


def test_a_site_that_is_not_there_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CONNECT_SECONDS", 0.2)
    with pytest.raises(SiteUnreachable, match=r"within 0\.2 s"):
        _ = RemoteSite(Access(address=f"unix:{tmp_path}/none")).declared_size


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/run/site.sock", True),
        ("localhost:9301", True),
        ("127.0.0.1:9301", True),
        ("[::1]:9301", True),
        ("0.0.0.0:9301", False),
        ("[::]:9301", False),
        ("hospital:9301", False),
    ],
)
def test_what_others_can_listen_in_on_needs_tls(address: str, local: bool) -> None:
    access = Access(address=address)
    assert access.local is local
    if local:
        access.open_channel().close()
        access = replace(access, certificate=Path("own"), key=Path("own"))  # a proof, and nobody to show it to
    with pytest.raises(ConfigError, match="name the CA's certificate"):
        access.open_channel()


def test_what_a_daemon_takes_a_gate_lets_through() -> None:
    assert channel.MAX_MESSAGE_BYTES == gate._MAX_BODY == 256 * 2**20


def test_a_key_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the CA's certificate .*none"):
        Access(address="hospital:1", ca=tmp_path / "none").open_channel()


def test_a_short_token_is_none(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32 + "\n")
    assert Access(address="unix:x", token=token).secret() == "t" * 32
    token.write_text("t" * 31 + "\n")
    with pytest.raises(ConfigError, match=r"at least 32 characters in .*, got 31"):
        Access(address="unix:x", token=token).secret()


def test_a_node_names_its_site_in_its_config() -> None:
    assert Access.of_node({"partition-id": 1}) is None
    named = {"site": "unix:x", "site-ca": "a", "site-certificate": "b", "site-key": "c", "site-token": "d"}
    assert Access.of_node(named) == Access(
        address="unix:x", ca=Path("a"), certificate=Path("b"), key=Path("c"), token=Path("d")
    )


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_socket_is_made_for_owner_and_group_at_most(umask: int) -> None:
    before = os.umask(umask)
    try:
        with channel._closed_to_strangers():
            inside = os.umask(0o777)
            os.umask(inside)
        assert inside == umask | 0o007
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
