"""How a local deployment starts its processes, keeps them going, waits for them and ends them; no SuperLink here."""

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from common.errors import DeploymentError
from deployment import processes
from deployment.keys import ServerKeys, SiteKeys
from deployment.processes import (
    LocalDeployment,
    LocalSite,
    Supervised,
    descendants,
    hold_port,
    message_cpu_seconds,
    port_of,
)
from tests.deployment.clock import Clock
from tests.deployment.running import wait_until
from tests.deployment.servers import FakeLink, serving


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(processes, "time", clock)
    return clock


@pytest.fixture
def started() -> Iterator[list[Supervised]]:
    """Processes that are ended after the test, whatever became of it."""
    started: list[Supervised] = []
    yield started
    for process in started:
        process.end(signal.SIGKILL)
        process.wait(10)


def shell(started: list[Supervised], folder: Path, script: str, **environment: str) -> Supervised:
    process = Supervised("one", ["sh", "-c", script], environment, folder / "logs" / "deep" / "one.log")
    started.append(process)
    return process


def log_of(folder: Path) -> str:
    return (folder / "logs" / "deep" / "one.log").read_text()


class TestSupervised:
    def test_it_runs_in_a_session_of_its_own_with_what_it_is_given(
        self, started: list[Supervised], tmp_path: Path
    ) -> None:
        process = shell(started, tmp_path, 'echo "$GIVEN $HOME"; echo bad >&2; sleep 60', GIVEN="given")
        assert process.name == "one" and process.runs and process.starts == 1
        wait_until(lambda: log_of(tmp_path) == f"given {os.environ['HOME']}\nbad\n")
        assert os.getsid(process.process.pid) == process.process.pid

    def test_it_is_started_again_once_it_has_ended_and_a_second_is_over(
        self, started: list[Supervised], tmp_path: Path, clock: Clock
    ) -> None:
        process = shell(started, tmp_path, f"echo started; [ -e {tmp_path}/stay ] && exec sleep 60")
        process.wait(10)
        assert not process.runs
        clock.sleep(0.5)
        process.tend()
        assert process.starts == 1
        (tmp_path / "stay").touch()
        clock.sleep(0.5)
        process.tend()
        assert process.starts == 2 and process.runs
        clock.sleep(9.0)
        process.tend()  # it runs
        assert process.starts == 2
        wait_until(lambda: log_of(tmp_path) == "started\nstarted\n")

    def test_it_ends_with_all_that_it_has_started(self, started: list[Supervised], tmp_path: Path) -> None:
        process = shell(started, tmp_path, "sleep 60 & sh -c 'sleep 60 & wait' & wait")
        wait_until(lambda: len(descendants(process.process.pid)) == 3)
        children = descendants(process.process.pid)
        process.end(signal.SIGTERM)
        process.wait(10)
        assert process.process.returncode == -signal.SIGTERM
        wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in children))
        process.end(signal.SIGKILL)  # nobody is left, and that is no error

    def test_it_is_not_waited_for_longer_than_asked(self, started: list[Supervised], tmp_path: Path) -> None:
        process = shell(started, tmp_path, "exec sleep 60")
        process.wait(0.01)
        process.wait(-1.0)
        assert process.runs

    def test_the_tail_of_its_log_has_15_lines(self, started: list[Supervised], tmp_path: Path) -> None:
        process = shell(started, tmp_path, r"printf '\377\n'; seq 14")
        process.wait(10)
        assert process.tail().splitlines() == ["\ufffd", *map(str, range(1, 15))]
        shell(started, tmp_path, "echo 15").wait(10)
        assert process.tail().splitlines() == [*map(str, range(1, 16))]


class TestWaiting:
    @pytest.fixture
    def deployment(self, tmp_path: Path, keys: ServerKeys, clock: Clock) -> Iterator[LocalDeployment]:
        deployment = LocalDeployment(tmp_path, keys, [])
        yield deployment
        deployment.close()

    def test_it_ends_once_it_is_ready(self, deployment: LocalDeployment, clock: Clock) -> None:
        deployment.add("one", ["sleep", "60"])
        ready = iter([False, False, True])
        deployment.wait_for("one", lambda: next(ready), 1.0)
        assert clock.slept == [0.1, 0.1]

    def test_it_ends_in_time_with_the_end_of_the_log(self, deployment: LocalDeployment, clock: Clock) -> None:
        one = deployment.add("one", ["sh", "-c", "echo not yet; exec sleep 60"])
        wait_until(one.tail)
        with pytest.raises(DeploymentError, match=r"^one is not ready after 0.5 s; its log ends so:\nnot yet$"):
            deployment.wait_for("one", lambda: False, 0.5)
        assert clock.slept == [0.1] * 5
        with pytest.raises(DeploymentError, match=r"^one is not ready after 60 s"):
            deployment.wait_for("one", lambda: False)

    def test_it_ends_when_the_process_does(self, deployment: LocalDeployment, clock: Clock) -> None:
        one = deployment.add("one", ["sh", "-c", "echo no such option"])
        one.wait(10)
        ended = "^one ended while it was waited for; its log ends so:\nno such option"
        with pytest.raises(DeploymentError, match=ended):
            deployment.wait_for("one", lambda: False)
        assert not clock.slept

    def test_it_ends_when_the_process_had_to_be_started_again(self, deployment: LocalDeployment, clock: Clock) -> None:
        one = deployment.add("one", ["sleep", "60"])

        def started_again() -> bool:
            one.starts += 1
            return False

        with pytest.raises(DeploymentError, match="one ended while it was waited for"):
            deployment.wait_for("one", started_again)
        assert not clock.slept


class FakeProcess:
    """Stands where a process would, and writes down what is done to it; ending takes it three seconds."""

    def __init__(self, done: list[Any], name: str, command: Sequence[str], environment: dict[str, str], log: Path):
        self.name, self.command, self.environment, self.log = name, list(command), environment, log
        self.done, self.runs, self.starts = done, True, 1
        done.append(("start", name))

    def end(self, number: int) -> None:
        self.done.append((signal.Signals(number).name, self.name))

    def wait(self, seconds: float) -> None:
        self.done.append((seconds, self.name))
        processes.time.sleep(3.0)

    def tend(self) -> None:
        self.done.append(("tend", self.name))

    def tail(self) -> str:
        return "the log"


class TestDeployment:
    @pytest.fixture
    def done(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[Any]:
        done: list[Any] = []
        monkeypatch.setattr(processes, "Supervised", lambda *given: FakeProcess(done, *given))
        monkeypatch.setattr(LocalDeployment, "_supervise", lambda self: done.append("supervising"))
        return done

    @pytest.fixture
    def sites(self, tmp_path: Path, keys: ServerKeys) -> list[LocalSite]:
        names = ("site-1", "site-2")
        made = [SiteKeys.create(tmp_path / "keys" / name, keys.ca, (), 1) for name in names]
        return [LocalSite(name, each, ("serve", name)) for name, each in zip(names, made, strict=True)]

    @pytest.fixture
    def deployment(
        self, tmp_path: Path, keys: ServerKeys, sites: list[LocalSite], done: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> LocalDeployment:
        deployment = LocalDeployment(tmp_path, keys, sites)
        asked = iter([False, True])
        monkeypatch.setattr(deployment.link, "answers", lambda: done.append("link?") or next(asked))
        monkeypatch.setattr(deployment, "_gate_answers", lambda: not done.append("gate?"))
        monkeypatch.setattr(deployment.link, "register", lambda key, name: done.append((key, name)))
        return deployment

    def test_it_starts_in_order_and_the_superlink_ends_last(
        self, deployment: LocalDeployment, sites: list[LocalSite], done: list[Any]
    ) -> None:
        with deployment as entered:
            assert entered is deployment
            wait_until(lambda: "supervising" in done)
            done.remove("supervising")
            assert done == [
                *[("start", name) for name in ("superlink", "gate", "superexec", "site-1-daemon", "site-2-daemon")],
                *["link?", "link?", "gate?"],
                *[(sites[0].keys.public, "site-1"), ("start", "site-1-node")],
                *[(sites[1].keys.public, "site-2"), ("start", "site-2-node")],
            ]
            done.clear()
        first = ["superexec", "site-1-daemon", "site-2-daemon", "site-1-node", "site-2-node"]
        assert done == [
            *[("SIGTERM", name) for name in first],
            *zip((10.0, 7.0, 4.0, 1.0, -2.0), first, strict=True),
            *[what for name in first for what in (("SIGKILL", name), (10.0, name))],
            *[what for name in ("gate", "superlink") for what in (("SIGKILL", name), (10.0, name))],
        ]

    def test_its_ports_are_its_own_until_it_ends(self, deployment: LocalDeployment, sites: list[LocalSite]) -> None:
        with deployment:
            addresses = [deployment.address, deployment.gate, *map(deployment.daemon_address, sites)]
            ports = {int(re.fullmatch(r"127\.0\.0\.1:(\d+)", address)[1]) for address in addresses}  # type: ignore[index]
            node = deployment.processes["site-1-node"].command  # type: ignore[attr-defined]
            ports.add(int(node[node.index("--port") + 1]))
            assert len(ports) == 5 and not any(map(can_be_had, ports))
            assert deployment.daemon_address(sites[0]) == deployment.daemon_address(sites[0])
        assert all(map(can_be_had, ports))

    def test_every_process_has_its_command_and_a_home_of_its_own(
        self, deployment: LocalDeployment, keys: ServerKeys, sites: list[LocalSite], tmp_path: Path
    ) -> None:
        with deployment:
            made: dict[str, Any] = dict(deployment.processes)
        beside, link, app, node = Path(sys.executable).parent, keys.link, keys.app, sites[1].keys.node
        host, port = deployment.address.split(":")
        assert [str(word) for word in made["superlink"].command] == [
            *(f"{beside}/flower-superlink", "--host", host, "--port", port, "--isolation", "process"),
            *("--ssl-ca-certfile", f"{link}/ca.crt", "--ssl-certfile", f"{link}/server.crt"),
            *("--ssl-keyfile", f"{link}/server.key", "--enable-supernode-auth"),
            *("--superexec-auth-secret-file", f"{link}/superexec.secret", "--database", f"{tmp_path}/superlink.db"),
        ]
        assert made["gate"].command == [
            *(sys.executable, "-m", "deployment.gate", "--listen", deployment.gate),
            *("--superlink", deployment.address, "--keys", str(link)),
        ]
        assert made["superexec"].command == [
            *(f"{beside}/flower-superexec", "--runtime-api-address", deployment.address),
            *("--root-certificates", f"{app}/ca.crt", "--superexec-auth-secret-file", f"{app}/superexec.secret"),
        ]
        daemon, address = sites[1].keys.daemon, deployment.daemon_address(sites[1])
        assert made["site-2-daemon"].command == [
            *("serve", "site-2", "--listen", address, "--tls-ca", f"{daemon}/daemon-ca.crt"),
            *("--tls-certificate", f"{daemon}/daemon.crt", "--tls-key", f"{daemon}/daemon.key"),
        ]
        command = made["site-2-node"].command
        command[command.index("--port") + 1] = "PORT"
        assert command == [
            *(sys.executable, "-m", "deployment.warm_node", "--superlink", deployment.gate),
            *("--root-certificates", f"{node}/ca.crt", "--port", "PORT"),
            *("--auth-supernode-private-key", f"{node}/node.key", "--node-config"),
            f'partition-id=1 site="{address}" site-ca="{node}/daemon-ca.crt" '
            f'site-certificate="{node}/shim.crt" site-key="{node}/shim.key"',
        ]
        for name, process in made.items():
            poll = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"} if name.endswith(("node", "superexec")) else {}
            home = tmp_path / "flower" / name
            assert home.is_dir() and process.log == tmp_path / "logs" / f"{name}.log"
            path = f"{beside}{os.pathsep}{os.environ['PATH']}"
            assert process.environment == {**processes.QUIET, "FLWR_HOME": str(home), "PATH": path, **poll}

    def test_one_that_does_not_come_up_is_ended_whole(self, deployment: LocalDeployment, done: list[Any]) -> None:
        def ends() -> bool:
            deployment.processes["superlink"].runs = False  # type: ignore[misc]
            return False

        deployment.link.answers = ends  # type: ignore[method-assign]
        with pytest.raises(DeploymentError, match="superlink ended while it was waited for"), deployment:
            pytest.fail("it is up")
        assert ("SIGKILL", "superlink") in done and ("SIGTERM", "site-2-daemon") in done

    def test_one_whose_gate_does_not_come_up_is_ended_whole(
        self, deployment: LocalDeployment, done: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deployment, "_gate_answers", lambda: False)
        with (
            pytest.raises(DeploymentError, match="gate is not ready after 60 s; its log ends so:\nthe log"),
            deployment,
        ):
            pytest.fail("it is up")
        assert ("SIGKILL", "gate") in done

    def test_a_process_that_is_removed_is_ended_and_can_be_added_again(
        self, deployment: LocalDeployment, sites: list[LocalSite], done: list[Any]
    ) -> None:
        deployment.add_node(sites[0])
        deployment.remove("site-1-node")
        assert not deployment.processes
        assert done[1:] == [(what, "site-1-node") for what in ("SIGTERM", 10.0, "SIGKILL", 10.0)]
        assert deployment.add_node(sites[0]) is deployment.processes["site-1-node"]


def can_be_had(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class TestSupervision:
    def test_what_ends_is_started_again_until_the_deployment_ends(self, tmp_path: Path, keys: ServerKeys) -> None:
        deployment = LocalDeployment(tmp_path, keys, [])
        threads = threading.active_count()
        supervising = threading.Thread(target=deployment._supervise)
        supervising.start()
        one = deployment.add("one", ["sh", "-c", "echo started; exec sleep 60"])
        one.process.kill()
        wait_until(lambda: one.starts == 2)
        deployment.close()
        supervising.join(10)
        assert threading.active_count() == threads
        assert not one.runs

    def test_it_looks_ten_times_a_second(self, tmp_path: Path, keys: ServerKeys) -> None:
        looked: list[object] = []

        class Stopping:
            def wait(self, seconds: float) -> bool:
                looked.append(seconds)
                return looked.count(seconds) > 2

            def is_set(self) -> bool:
                return False

        class Tended:
            def tend(self) -> None:
                looked.append("tended")

        deployment = LocalDeployment(tmp_path, keys, [])
        deployment._stopping = Stopping()  # type: ignore[assignment]
        deployment.processes["one"] = Tended()  # type: ignore[assignment]
        deployment._supervise()
        assert looked == [0.1, "tended", 0.1, "tended", 0.1]

    def test_nothing_is_started_once_everything_was_ended(self, tmp_path: Path, keys: ServerKeys) -> None:
        class Stopping:
            def wait(self, seconds: float) -> bool:
                return False

            def is_set(self) -> bool:
                return True

        deployment = LocalDeployment(tmp_path, keys, [])
        deployment._stopping = Stopping()  # type: ignore[assignment]
        deployment.processes["one"] = None  # type: ignore[assignment]
        deployment._supervise()


class TestPorts:
    def test_a_held_port_is_given_to_nobody_but_to_who_names_it(self) -> None:
        with hold_port() as held, socket.socket() as server, socket.socket() as client:
            assert not can_be_had(port_of(held))
            assert client.connect_ex(("127.0.0.1", port_of(held))) != 0
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port_of(held)))
            server.listen()
            port = port_of(held)
        assert can_be_had(port)

    def test_a_strangers_server_is_not_taken_for_ours(
        self, tmp_path: Path, keys: ServerKeys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        others = ServerKeys.create(tmp_path / "others", ("localhost", "127.0.0.1"), 1)
        programs = tmp_path / "bin"
        programs.mkdir()
        for name in ("flower-superlink", "flower-superexec"):
            (programs / name).write_text("#!/bin/sh\nexec sleep 60\n")
            (programs / name).chmod(0o755)
        monkeypatch.setattr(processes, "_BIN", programs)
        with serving(FakeLink().app, others) as address:
            deployment = LocalDeployment(tmp_path, keys, [])
            monkeypatch.setattr(deployment.link, "_client", processes.SuperLink(address, keys.ca)._client)
            with pytest.raises(DeploymentError, match="its certificate is not of the given CA"), deployment:
                pytest.fail("it is up")
        assert not any(process.runs for process in deployment.processes.values())

    @pytest.mark.parametrize(("code", "ours", "answers"), [(200, True, True), (503, True, False), (200, False, False)])
    def test_the_gate_answers_once_it_has_found_the_superlink_and_nobody_in_its_place(
        self,
        tmp_path: Path,
        keys: ServerKeys,
        monkeypatch: pytest.MonkeyPatch,
        code: int,
        ours: bool,
        answers: bool,
    ) -> None:
        monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")  # where nobody is
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        others = ServerKeys.create(tmp_path / "others", ("localhost", "127.0.0.1"), 1)
        app = Starlette(routes=[Route("/health", lambda request: Response(status_code=code))])
        deployment = LocalDeployment(tmp_path, keys, [])
        assert not deployment._gate_answers()  # nobody is there
        with serving(app, keys if ours else others) as deployment.gate:
            assert deployment._gate_answers() is answers
        deployment.close()


class TestCounting:
    @pytest.fixture
    def proc(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(processes, "_PROC", tmp_path)
        monkeypatch.setattr(os, "sysconf", lambda name: {"SC_CLK_TCK": 4}[name])
        return tmp_path

    @staticmethod
    def put(proc: Path, pid: int, children: str, times: str = "0 0 0 0", command: str = "python") -> None:
        (proc / f"{pid}" / "task" / f"{pid}").mkdir(parents=True)
        (proc / f"{pid}" / "task" / f"{pid}" / "children").write_text(children)
        (proc / f"{pid}" / "stat").write_text(f"{pid} (a) b) S 1 2 3 4 5 6 7 8 9 10 {times} 20 0 1 0 99")
        (proc / f"{pid}" / "cmdline").write_bytes(f"{command}\0--x\0".encode())

    def test_descendants_are_found_at_every_depth(self, proc: Path) -> None:
        for pid, children in ((1, "2 5 "), (2, "3 "), (3, "4 "), (4, ""), (5, "6"), (7, "8")):
            self.put(proc, pid, children)
        assert descendants(1) == [2, 3, 4, 5, 6]  # the sixth has just ended

    def test_the_time_of_a_nodes_messages_is_counted_and_no_more(self, proc: Path) -> None:
        self.put(proc, 1, "2 3 9", times="1000 1000 1000 1000")
        self.put(proc, 2, "4 ", times="10 20 3 1", command="python -m deployment.warm_node")
        self.put(proc, 3, "", times="500 500 5 7", command="python /bin/flower-superexec")
        self.put(proc, 4, "", times="40 2 0 0")
        node = FakeProcess([], "node", (), {}, proc)
        node.process = type("Popen", (), {"pid": 1})  # type: ignore[attr-defined]
        assert message_cpu_seconds(node) == (10 + 20 + 3 + 1 + 5 + 7 + 40 + 2) / 4  # type: ignore[arg-type]
