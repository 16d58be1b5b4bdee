"""How long a shim waits for its site, and what it makes of every answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from client import remote
from client.channel import Access
from client.remote import RemoteSite
from client.rpc import site_pb2 as messages
from common.errors import DaemonStopped, ModelMissing, PlanRefused, SiteUnreachable, WireError

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
