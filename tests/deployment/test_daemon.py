"""The site's daemon, for real: gRPC over sockets, TLS and tokens, signals and kills."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client import remote, service
from client.app import app
from client.channel import DAEMON_OPTIONS, MAX_MESSAGE_BYTES, Access
from client.ledger import Ledger
from client.policy import SitePolicy
from client.randomness import OsRandomness
from client.remote import RemoteSite
from client.rpc import site_pb2 as messages
from client.rpc.site_pb2_grpc import SiteStub
from client.service import Daemon
from client.site import Guard, Site, Workbench
from common.broadcast import encode_held
from common.charges import Charge
from common.datasets import Dataset
from common.errors import ConfigError, ModelMissing, NoRelease, PlanRefused, SiteUnreachable, WireError
from common.models import initial_vector
from common.records import Introduction, ModelWanted, Refusal, Release, Request, parse_answer
from deployment.processes import hold_port, port_of
from tests.deployment.certificates import Authority
from tests.support import SMALL_MODEL, site_data, small_dataset, small_request

DATA = small_dataset()
START = initial_vector(SMALL_MODEL, 3)
ROUND = {"sampling_rate": 0.1, "steps": 4, "noise_multiplier": 1.0}
STEPS = 1000  # of a round that takes seconds: time to strike in the middle of it


def request(round_number: int = 1, **changes: object) -> tuple[bytes, bytes, bytes]:
    return *small_request(START, round=round_number, **{**ROUND, **changes}), b""


@contextmanager
def serving(folder: Path, access: Access, data: Dataset = DATA, **limits: object) -> Iterator[Ledger]:
    ledger = Ledger.create(folder / "ledger")
    policy = SitePolicy.parse(
        {"epsilon": 8.0, "delta": 1e-5, "models": [SMALL_MODEL], "value-codings": ["calibrated", "f32"], **limits}
    )
    guard = Guard(policy, ledger)
    site = Site(site_data(data.train_inputs, data.train_targets), OsRandomness(), Workbench("cpu"), guard)
    daemon = Daemon(site, guard, access, threads=1)
    daemon.start()
    try:
        yield ledger
    finally:
        daemon.stop(5)
        ledger.close()


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(address=f"unix:{tmp_path}/site.sock")


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CONNECT_SECONDS", 8.0)
    monkeypatch.setattr(remote, "_RESTART_SECONDS", 3.0)


@pytest.fixture
def port() -> Iterator[int]:
    with hold_port() as held:
        yield port_of(held)


def test_a_daemon_answers_as_its_site_does(tmp_path: Path, access: Access) -> None:
    with serving(tmp_path, access, **{"max-steps-per-round": 4}) as ledger:
        site = RemoteSite(access)
        assert site.declared_size == 240
        first = site.train(*request())
        assert site.train(*request()) == first
        plan, model = small_request(START + 1, round=2, **ROUND)  # a model that the site does not hold
        for bad, error in [
            (request(2, steps=5), PlanRefused),
            ((b"junk", model, b""), WireError),
            ((plan, b"junk", b""), WireError),
            ((plan, encode_held("0" * 16), b""), ModelMissing),
        ]:
            with pytest.raises(error):
                site.train(*bad)
        assert ledger.history == (Charge(1.0, 0.1, 4),)
        status = site.status()
        assert (status.entries, status.training, status.round, status.epsilon_budget) == (1, False, 2, 8.0)
        assert 0 < status.epsilon_spent < 8


def test_the_shim_carries_bytes_to_the_daemon_and_back(tmp_path: Path, access: Access) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def ask(content: RecordDict, kind: str) -> RecordDict:
        context = Context(1, 2, {"partition-id": 4, "site": access.address}, RecordDict(), {})
        return app(Message(content, 2, kind), context).content

    with serving(tmp_path, access):
        assert Introduction.from_content(ask(RecordDict(), "query")) == Introduction(4, 240, simulated=False)
        assert isinstance(parse_answer(ask(Request(*request()).to_content(), "train")), Release)
        refusal = parse_answer(ask(Request(*request(2, private=False)).to_content(), "train"))
        assert isinstance(refusal, Refusal) and refusal.for_good and "not private" in refusal.reason
        unknown = Request(small_request(START + 1, round=3, **ROUND)[0], encode_held("0" * 16)).to_content()
        assert isinstance(parse_answer(ask(unknown, "train")), ModelWanted)


def test_a_model_is_tried_on_the_sites_records_and_the_result_stays_there(
    tmp_path: Path, access: Access, caplog: pytest.LogCaptureFixture
) -> None:
    plan, model, _ = request()
    with serving(tmp_path, access), access.open_channel() as channel, caplog.at_level("INFO", "fedsieve.site"):
        reply = SiteStub(channel).Evaluate(messages.EvaluateRequest(plan=plan, model=model))
        assert reply.ByteSize() == 0
        assert "accuracy 0." in caplog.text
        other = small_request(np.zeros(26_010, np.float32), model="dp-cnn-s")
        with pytest.raises(grpc.RpcError, match="outside this site's policy"):
            SiteStub(channel).Evaluate(messages.EvaluateRequest(plan=other[0], model=other[1]))


def test_progress_comes_as_it_happens(tmp_path: Path, access: Access) -> None:
    plan, model, _ = request()
    with serving(tmp_path, access), access.open_channel() as channel:
        *steps, last = SiteStub(channel).Train(messages.TrainRequest(plan=plan, model=model))
        assert [(one.progress.steps_done, one.progress.steps) for one in steps] == [(done, 4) for done in range(4)]
        assert last.WhichOneof("event") == "update" and last.update


def test_nothing_that_a_server_names_is_imported(
    tmp_path: Path, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_by_a_server.py").write_text("build = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    plan, model, _ = request(model="named_by_a_server:build")
    with serving(tmp_path, access) as ledger, access.open_channel() as channel:
        with pytest.raises(PlanRefused, match="outside this site's policy: models are"):
            RemoteSite(access).train(plan, model, b"")
        with pytest.raises(grpc.RpcError, match="outside this site's policy: models are"):
            SiteStub(channel).Evaluate(messages.EvaluateRequest(plan=plan, model=model))
        assert ledger.length == 0
    assert "named_by_a_server" not in sys.modules


def test_what_goes_wrong_with_a_record_is_for_the_sites_log_alone(
    tmp_path: Path, access: Access, caplog: pytest.LogCaptureFixture
) -> None:
    impossible = replace(DATA, train_targets=np.full_like(DATA.train_targets, 7))  # of 3 classes
    plan, model, _ = request(sampling_rate=1.0, noise_multiplier=10.0)
    with serving(tmp_path, access, impossible), access.open_channel() as channel:
        stub = SiteStub(channel)
        for ask in (
            lambda: stub.Evaluate(messages.EvaluateRequest(plan=plan, model=model)),
            lambda: list(stub.Train(messages.TrainRequest(plan=plan, model=model))),
        ):
            with pytest.raises(grpc.RpcError) as failed:
                ask()
            assert failed.value.code() is grpc.StatusCode.INTERNAL
            assert failed.value.details() in ("evaluation failed at the site", str(NoRelease()))
    assert "Target 7 is out of bounds" in caplog.text


def test_a_unix_socket_is_closed_to_strangers(tmp_path: Path, access: Access) -> None:
    before = os.umask(0)
    try:
        with serving(tmp_path, access):
            assert stat.S_IMODE((tmp_path / "site.sock").stat().st_mode) == 0o770
    finally:
        os.umask(before)


def test_health(tmp_path: Path, access: Access) -> None:
    with serving(tmp_path, access), access.open_channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(service="fedsieve.site.v1.Site"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_nobody_is_let_in_without_the_token(tmp_path: Path, port: int) -> None:
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    token.write_text("t" * 40)
    wrong.write_text("w" * 40)
    address = f"127.0.0.1:{port}"
    with serving(tmp_path, Access(address=address, token=token)) as ledger:
        for other in (None, wrong):
            with pytest.raises(SiteUnreachable, match="UNAUTHENTICATED"):
                RemoteSite(Access(address=address, token=other)).train(*request())
        assert ledger.length == 0
        assert RemoteSite(Access(address=address, token=token)).train(*request())
    token.write_text("short")
    with pytest.raises(ConfigError, match="at least 32 characters"):
        RemoteSite(Access(address=address, token=token))


def test_both_sides_prove_who_they_are(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, others = Authority(tmp_path / "ours", "ca"), Authority(tmp_path / "others", "ca")
    server, shim, stranger = ours.issue("server"), ours.issue("shim"), others.issue("stranger")
    address = f"localhost:{port}"
    with serving(tmp_path, Access(address=address, **vars(server))) as ledger:
        assert RemoteSite(Access(address=address, **vars(shim))).train(*request())
        monkeypatch.setattr(remote, "_CONNECT_SECONDS", 2.0)  # it has just answered faster
        strangers_key = Access(address=address, ca=shim.ca, certificate=stranger.certificate, key=stranger.key)
        wrong_ca = Access(address=address, ca=stranger.ca, certificate=shim.certificate, key=shim.key)

        def ask(bad: Access) -> None:
            with pytest.raises(SiteUnreachable):
                RemoteSite(bad).train(*request(2))

        with ThreadPoolExecutor() as at_once:  # each of them tries until its time is up
            list(at_once.map(ask, (strangers_key, wrong_ca, Access(address=address))))
        assert ledger.length == 1
        assert RemoteSite(Access(address=address, **vars(shim))).train(*request(2))


def test_a_token_travels_under_tls(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    token.write_text("t" * 40)
    wrong.write_text("w" * 40)
    ours, others = Authority(tmp_path / "ours", "ca"), Authority(tmp_path / "others", "ca")
    server = ours.issue("daemon")
    address = f"localhost:{port}"
    daemon = Access(address=f"0.0.0.0:{port}", certificate=server.certificate, key=server.key, token=token)
    with serving(tmp_path, daemon) as ledger:
        for bad in (Access(address=address, ca=ours.ca), Access(address=address, ca=ours.ca, token=wrong)):
            with pytest.raises(SiteUnreachable, match="UNAUTHENTICATED"):
                RemoteSite(bad).train(*request())
        assert ledger.length == 0
        assert RemoteSite(Access(address=address, ca=ours.ca, token=token)).train(*request())
        monkeypatch.setattr(remote, "_CONNECT_SECONDS", 2.0)  # it has just answered faster
        for bad in (Access(address=address, ca=others.ca, token=token), Access(address=address, token=token)):
            with pytest.raises(SiteUnreachable, match="no site answers"):
                RemoteSite(bad).train(*request(2))
        assert ledger.length == 1


def test_an_open_address_needs_keys(tmp_path: Path, port: int) -> None:
    server = Authority(tmp_path / "ours", "ca").issue("daemon")
    (tmp_path / "token").write_text("t" * 40)
    address, token = f"0.0.0.0:{port}", tmp_path / "token"
    for access, message in (
        (Access(address=address), "can be reached from other hosts"),
        (Access(address=address, token=token), "can be reached from other hosts"),  # it could be read on its way
        (Access(address=address, certificate=server.certificate, key=server.key), "lets everybody in"),
        (Access(address="localhost:1", ca=server.ca), "three files"),
    ):
        with pytest.raises(ConfigError, match=message), serving(tmp_path / str(len(list(tmp_path.iterdir()))), access):
            pass
    for access in (Access(address="hospital:9301", token=token), Access(address="hospital:9301")):
        with pytest.raises(ConfigError, match="name the CA's certificate"):
            RemoteSite(access).train(*request())
    with pytest.raises(ConfigError, match="go together"):
        Access(address="x:1", certificate=tmp_path)


def test_a_message_that_is_too_long_is_refused_before_anything_is_done(
    tmp_path: Path, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _, _ = request()
    limits = {name: value for name, value in DAEMON_OPTIONS if name.endswith("message_length")}
    assert set(limits.values()) == {MAX_MESSAGE_BYTES}
    limit = 1 << 20  # the same, sooner
    options = [(name, limit if name in limits else value) for name, value in DAEMON_OPTIONS]
    monkeypatch.setattr(service, "DAEMON_OPTIONS", options)
    too_long = messages.TrainRequest(plan=plan, model=bytes(limit))
    unlimited = [("grpc.max_send_message_length", -1)]
    with serving(tmp_path, access) as ledger:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            with (
                grpc.insecure_channel(access.address, options=unlimited, compression=compression) as channel,
                pytest.raises(grpc.RpcError) as refused,
            ):
                list(SiteStub(channel).Train(too_long))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ledger.length == 0
        assert RemoteSite(access).train(*request())


def test_an_address_is_served_by_one_daemon_alone(tmp_path: Path, port: int) -> None:
    access = Access(address=f"127.0.0.1:{port}")
    (tmp_path / "second").mkdir()
    second = serving(tmp_path / "second", access)
    with serving(tmp_path, access), pytest.raises(ConfigError, match="another daemon"):
        second.__enter__()


def test_what_waits_when_the_daemon_stops_is_not_charged(tmp_path: Path, access: Access) -> None:
    failures: list[Exception] = []

    def ask(number: int) -> None:
        try:
            RemoteSite(access).train(*request(number, steps=5000, noise_multiplier=100.0))
        except Exception as error:
            failures.append(error)

    with serving(tmp_path, access) as ledger:
        asking = [threading.Thread(target=ask, args=(number,)) for number in (1, 2, 3)]
        for thread in asking:
            thread.start()
        deadline = time.monotonic() + 60
        while RemoteSite(access).status().progress.steps_done < 5:
            assert time.monotonic() < deadline, "the training did not begin"
            time.sleep(0.02)
        time.sleep(0.2)  # the others are waiting by now
    for thread in asking:
        thread.join(30)
    assert len(failures) == 3 and ledger.length == 1


def test_a_daemon_that_is_not_there_is_named(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CONNECT_SECONDS", 0.5)
    with pytest.raises(SiteUnreachable, match="is 'fedsieve site serve' running there"):
        RemoteSite(access).train(*request())


@contextmanager
def process(folder: Path, address: str, steps: int) -> Iterator["subprocess.Popen[str]"]:
    """Run ``fedsieve site serve`` until the end of the block."""
    data, policy = folder / "data.npz", folder / "site.toml"
    np.savez(
        data,
        train_inputs=DATA.train_inputs,
        train_targets=DATA.train_targets,
        test_inputs=DATA.test_inputs,
        test_targets=DATA.test_targets,
    )
    limits = f'epsilon = 8\ndelta = 1e-5\nmodels = ["{SMALL_MODEL}"]\nmax-steps-per-round = {steps}\n'
    policy.write_text(limits + 'value-codings = ["f32"]\n')
    if not (folder / "ledger").exists():
        Ledger.create(folder / "ledger").close()
    command = [sys.executable, "-W", "ignore", "-m", "simulations.cli", "site", "serve", "--data", str(data)]
    command += ["--policy", str(policy), "--ledger", str(folder / "ledger"), "--listen", address, "--threads", "1"]
    command += ["--declared-size", "240"]
    daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert daemon.stderr is not None
    try:
        line = ""
        while "serving" not in line:
            line = daemon.stderr.readline()
            assert line, f"the daemon did not start (exit {daemon.wait()})"
        threading.Thread(target=daemon.stderr.read, daemon=True).start()
        yield daemon
    finally:
        if daemon.poll() is None:
            daemon.kill()
        daemon.wait()


def in_the_middle_of_training(access: Access, strike: Callable[[], None]) -> Exception:
    """Ask for a long round, strike once it is on its way, and return how the asker learns of it."""
    failures: list[Exception] = []

    def ask() -> None:
        try:
            RemoteSite(access).train(*request(1, steps=STEPS, noise_multiplier=100.0))
        except Exception as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    deadline = time.monotonic() + 60
    while RemoteSite(access).status().progress.steps_done < 5:
        assert time.monotonic() < deadline, "the training did not begin"
        time.sleep(0.02)
    strike()
    asking.join(60)
    assert len(failures) == 1
    return failures[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_daemon_struck_in_the_middle_of_a_round_has_charged_and_not_released(tmp_path: Path, number: int) -> None:
    access = Access(address=f"unix:{tmp_path}/site.sock")
    with process(tmp_path, access.address, STEPS) as daemon:
        failure = in_the_middle_of_training(access, lambda: os.kill(daemon.pid, number))
        assert isinstance(failure, SiteUnreachable)
        assert daemon.wait(60) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    ledger = Ledger(tmp_path / "ledger")
    (entry,) = ledger.entries()
    assert entry.charge == Charge(100.0, 0.1, STEPS) and ledger.release_of(entry) is None
    ledger.close()
    if number != signal.SIGKILL:
        return  # the ledger says the same after both
    # The same round, asked again after the restart, is carried out under the same charge.
    with process(tmp_path, access.address, STEPS):
        site = RemoteSite(access)
        first = site.train(*request(1, steps=STEPS, noise_multiplier=100.0))
        assert site.train(*request(1, steps=STEPS, noise_multiplier=100.0)) == first
        assert site.status().entries == 1
