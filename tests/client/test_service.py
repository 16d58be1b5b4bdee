"""What a daemon answers, without sockets: every outcome of a training, one training at a time, and who is let in."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from client.channel import TOKEN_KEY, Access
from client.rpc import site_pb2 as messages
from client.service import Daemon, SiteService, _TokenCheck
from client.site import SiteScore, TrainingStopped
from common.charges import Charge
from common.errors import FedsieveError, LedgerError, ModelMissing, NoRelease, PlanRefused, WireError
from tests.support import small_plan

PLAN = small_plan(10, run="a run", round=7, steps=3)
REQUEST = messages.TrainRequest(plan=PLAN.to_bytes(), model=b"model", signature=b"signature")
POLICY = SimpleNamespace(delta=1e-5, accountant="rdp", epsilon=8.0)
GUARD = SimpleNamespace(policy=POLICY, ledger=SimpleNamespace(length=2, history=(Charge(1.0, 0.1, 4),)))


class AbortedError(Exception):
    pass


class Call:
    def __init__(self, active: bool = True) -> None:
        self.active = active

    def is_active(self) -> bool:
        return self.active

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise AbortedError(code, details)


class Pretended:
    """A site that reports a step and then answers, or fails."""

    declared_size = 240

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.asked, self.go_on = failure, [], threading.Event()
        self.go_on.set()

    def train(self, plan: bytes, model: bytes, signature: bytes, progress: Any) -> bytes:
        self.asked.append((plan, model, signature))
        progress(1)
        self.go_on.wait(60)
        progress(2)
        if self.failure:
            raise self.failure
        return b"update"

    def evaluate(self, plan: bytes, model: bytes, signature: bytes) -> SiteScore:
        if self.failure:
            raise self.failure
        return SiteScore("digest", None, 0.5)


def service_of(site: Pretended) -> SiteService:
    return SiteService(site, GUARD)  # type: ignore[arg-type]


def train(service: SiteService, call: Call | None = None) -> list[messages.TrainReply]:
    try:
        return list(service.Train(REQUEST, call or Call()))  # type: ignore[arg-type]
    finally:
        with service._training:  # until the worker is done
            pass


def test_steps_and_then_the_update() -> None:
    site = Pretended()
    service = service_of(site)
    *steps, last = train(service)
    assert [(one.progress.steps_done, one.progress.steps) for one in steps] == [(1, 3), (2, 3)]
    assert last.update == b"update" and site.asked == [(PLAN.to_bytes(), b"model", b"signature")]
    status = service.Status(None, None)  # type: ignore[arg-type]
    assert (status.training, status.run, status.round, status.progress.steps_done) == (False, "a run", 7, 2)
    assert (status.entries, status.epsilon_budget, status.delta) == (2, 8.0, 1e-5)
    assert status.epsilon_spent > 0 and status.version


@pytest.mark.parametrize(
    ("failure", "event"),
    [
        (PlanRefused("too much"), {"refusal": ("too much", True)}),
        (PlanRefused("not now", for_good=False), {"refusal": ("not now", False)}),
        (WireError("junk"), {"damaged": "junk"}),
        (ModelMissing(), {"model_wanted": True}),
    ],
)
def test_what_is_not_carried_out_is_an_answer(failure: Exception, event: dict[str, Any]) -> None:
    last = train(service_of(Pretended(failure)))[-1]
    found: Any = getattr(last, last.WhichOneof("event"))
    if isinstance(found, messages.Refusal):
        found = (found.reason, found.for_good)
    assert {last.WhichOneof("event"): found} == event


@pytest.mark.parametrize(
    ("failure", "code", "details"),
    [
        (TrainingStopped("stopped"), grpc.StatusCode.UNAVAILABLE, "stopped"),
        (NoRelease(), grpc.StatusCode.INTERNAL, str(NoRelease())),
        (LedgerError("the disk is full"), grpc.StatusCode.INTERNAL, "the disk is full"),
        (ValueError("record 5"), grpc.StatusCode.INTERNAL, "training failed at the site"),
    ],
)
def test_what_fails_ends_the_call_and_says_nothing_of_records(
    failure: Exception, code: grpc.StatusCode, details: str
) -> None:
    service = service_of(Pretended(failure))
    with pytest.raises(AbortedError) as aborted:
        train(service)
    assert aborted.value.args == (code, details)
    assert not service.Status(None, None).training  # type: ignore[arg-type]


def test_one_training_at_a_time_none_for_who_is_gone_and_none_once_it_stops() -> None:
    site = Pretended()
    site.go_on.clear()
    service = service_of(site)
    first, gone, outcomes = service.Train(REQUEST, Call()), Call(), []  # type: ignore[arg-type]
    next(first)
    assert service.Status(None, None).training  # type: ignore[arg-type]

    def ask() -> None:
        try:
            train(service, gone)
        except AbortedError as aborted:
            outcomes.append(aborted.args)

    second = threading.Thread(target=ask)
    second.start()
    # A training that hangs must not keep the daemon from ending.
    workers = [thread for thread in threading.enumerate() if "(_train)" in thread.name]
    assert workers and all(worker.daemon for worker in workers)
    second.join(0.2)
    assert second.is_alive() and len(site.asked) == 1
    gone.active = False
    site.go_on.set()
    assert [reply.WhichOneof("event") for reply in first] == ["progress", "update"]
    second.join(60)
    service.stop()
    ask()
    assert outcomes == [(grpc.StatusCode.UNAVAILABLE, "the site is being stopped, or the asker is gone")] * 2
    assert len(site.asked) == 1


def test_a_training_ends_at_its_next_step_once_the_site_is_stopped() -> None:
    site = Pretended()
    site.go_on.clear()
    service = service_of(site)
    replies = service.Train(REQUEST, Call())  # type: ignore[arg-type]
    next(replies)
    service.stop()
    site.go_on.set()
    with pytest.raises(AbortedError, match="in the middle of a round; its charge stays"):
        list(replies)


@pytest.mark.parametrize(
    ("failure", "code", "details"),
    [
        (FedsieveError("not this model"), grpc.StatusCode.FAILED_PRECONDITION, "not this model"),
        (ValueError("record 5"), grpc.StatusCode.INTERNAL, "evaluation failed at the site"),
    ],
)
def test_an_evaluation_that_fails(failure: Exception, code: grpc.StatusCode, details: str) -> None:
    with pytest.raises(AbortedError) as aborted:
        service_of(Pretended(failure)).Evaluate(messages.EvaluateRequest(), Call())  # type: ignore[arg-type]
    assert aborted.value.args == (code, details)


def test_a_score_stays_in_the_sites_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fedsieve.site"):
        reply = service_of(Pretended()).Evaluate(messages.EvaluateRequest(), Call())  # type: ignore[arg-type]
    assert reply.ByteSize() == 0
    assert caplog.messages == ["model digest: loss 0.5000 on this site's records"]


@pytest.mark.parametrize(
    ("method", "shown", "let_in"),
    [
        ("/fedsieve.site.v1.Site/Train", {TOKEN_KEY: "t" * 32}, True),
        ("/fedsieve.site.v1.Site/Train", {TOKEN_KEY: b"t" * 32}, True),
        ("/fedsieve.site.v1.Site/Train", {TOKEN_KEY: "w" * 32}, False),
        ("/fedsieve.site.v1.Site/Train", {}, False),
        ("/grpc.health.v1.Health/Check", {}, True),
        ("/grpc.healthy/Train", {}, False),
    ],
)
def test_who_is_let_in(method: str, shown: dict[str, str | bytes], let_in: bool) -> None:
    call = SimpleNamespace(method=method, invocation_metadata=tuple(shown.items()))
    found = _TokenCheck("t" * 32).intercept_service(lambda details: "in", call)
    assert (found == "in") is let_in
    if not let_in:
        with pytest.raises(AbortedError) as aborted:
            found.unary_unary(None, Call())
        assert aborted.value.args[0] is grpc.StatusCode.UNAUTHENTICATED


def test_a_daemon_that_stops_says_so_and_trains_no_more(tmp_path: Path) -> None:
    site = Pretended()
    daemon = Daemon(site, GUARD, Access(address=f"unix:{tmp_path}/site.sock"))  # type: ignore[arg-type]
    states = health_pb2.HealthCheckResponse

    def health() -> set[int]:
        names = ("", "fedsieve.site.v1.Site")
        return {daemon._health.Check(health_pb2.HealthCheckRequest(service=name), None).status for name in names}

    daemon.start()
    assert health() == {states.SERVING}
    daemon.stop(0)
    assert health() == {states.NOT_SERVING}
    with pytest.raises(AbortedError, match="the site is being stopped"):
        train(daemon._service)
    assert not site.asked
