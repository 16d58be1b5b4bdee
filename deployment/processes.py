"""A whole deployment as plain processes on this machine: the topology of docker-compose.yml, for laptops and tests.

One SuperLink (TLS, authenticated SuperNodes, SQLite) behind the gate, one SuperExec that starts ServerApps, and per
site a SuperNode with its shim and the site's daemon. A process that ends is started again, as a container's restart
policy does.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from common.errors import DeploymentError
from deployment.keys import ServerKeys, SiteKeys
from deployment.superlink import SuperLink

_BIN = Path(sys.executable).parent
_PROJECT = Path(__file__).resolve().parent.parent
_GRACE_SECONDS = 10.0
# No process phones home or installs anything.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
_LOOK_OFTEN = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}  # seconds: a node finds the work of a short round soon


@dataclass(frozen=True, slots=True)
class LocalSite:
    """One site: its keys, and the command of its daemon without the address and the keys to serve with."""

    name: str
    keys: SiteKeys
    daemon_command: tuple[str, ...]


@dataclass(slots=True)
class Supervised:
    """A process that is started again whenever it ends."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    starts: int = 0
    restart: bool = True
    _next_start: float = field(default=0.0)

    def tend(self) -> None:
        """Start the process unless it runs, or ran a moment ago."""
        if self.process is not None and self.process.poll() is None:
            return
        if (self.starts and not self.restart) or time.monotonic() < self._next_start:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            # A session of its own: whatever it starts can be ended with it, and Ctrl-C reaches the supervisor alone.
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.starts += 1
        self._next_start = time.monotonic() + 1.0

    def end(self, number: int) -> None:
        """Send a signal to the process and to all that it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def wait(self, seconds: float) -> None:
        """Return once the process has ended, or after ``seconds``."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.1, seconds))

    def tail(self, lines: int = 15) -> str:
        """Return the end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class LocalDeployment:
    """All processes of a deployment; a context manager that ends them."""

    def __init__(self, folder: Path, server: ServerKeys, sites: Sequence[LocalSite]) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"  # for the operator
        self.gate = f"127.0.0.1:{free_port()}"  # for sites
        self.server = server
        self.sites = sites
        self.link = SuperLink(self.address, server.ca)
        self.processes: dict[str, Supervised] = {}
        self._daemon_ports: dict[str, int] = {}
        self._stopping = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._lock = threading.Lock()

    def __enter__(self) -> "LocalDeployment":
        try:
            self._start_server()
            for site in self.sites:
                self.add_daemon(site)
            self._supervisor.start()
            self.wait_for("superlink", lambda: _listens(self.address))
            self.wait_for("gate", lambda: _listens(self.gate))
            self.link.wait_until_ready(60)
            for site in self.sites:
                self.link.register(site.keys.public, site.name)
                self.add_node(site)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process: the SuperLink last, so that nodes can say good-bye to it; it is built to be killed."""
        self._stopping.set()
        with self._lock:
            processes = list(self.processes.values())
            asked = [process for process in processes if process.name not in ("superlink", "gate")]
            for process in asked:
                process.end(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_SECONDS
            for process in asked:
                process.wait(deadline - time.monotonic())
            for process in processes:
                process.end(signal.SIGKILL)
                process.wait(_GRACE_SECONDS)
        if self._supervisor.is_alive():
            self._supervisor.join()

    def add(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Supervised:
        """Start a process and keep it going."""
        home = self.folder / "flower" / name
        home.mkdir(parents=True, exist_ok=True)
        path = f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**QUIET, "FLWR_HOME": str(home), "PATH": path, **(environment or {})}
        process = Supervised(name, command, environment, self.folder / "logs" / f"{name}.log")
        with self._lock:
            self.processes[name] = process
            process.tend()
        return process

    def add_daemon(self, site: LocalSite) -> Supervised:
        """Start a site's daemon."""
        keys = site.keys.daemon
        files = ("--tls-ca", "daemon-ca.crt", "--tls-certificate", "daemon.crt", "--tls-key", "daemon.key")
        options = [word if word.startswith("--") else str(keys / word) for word in files]
        return self.add(f"{site.name}-daemon", [*site.daemon_command, "--listen", self.daemon_address(site), *options])

    def remove(self, name: str) -> None:
        """End a process politely, and for good."""
        with self._lock:
            process = self.processes.pop(name)
        process.end(signal.SIGTERM)
        assert process.process is not None
        process.process.wait(30)

    def add_node(self, site: LocalSite) -> Supervised:
        """Start a site's SuperNode."""
        return self.add(f"{site.name}-node", self.node_command(site), _LOOK_OFTEN)

    def node_command(self, site: LocalSite) -> list[str]:
        """Return the command of a site's SuperNode."""
        keys = site.keys.node
        facts = {
            "partition-id": self.sites.index(site),
            "site": self.daemon_address(site),
            "site-ca": str(keys / "daemon-ca.crt"),
            "site-certificate": str(keys / "shim.crt"),
            "site-key": str(keys / "shim.key"),
        }
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in facts.items())
        command = [sys.executable, "-m", "deployment.warm_node", "--superlink", self.gate]
        command += ["--root-certificates", str(keys / "ca.crt"), "--port", str(free_port())]
        command += ["--auth-supernode-private-key", str(keys / "node.key"), "--node-config", config]
        return command

    def daemon_address(self, site: LocalSite) -> str:
        """Return where a site's daemon listens."""
        if site.name not in self._daemon_ports:
            self._daemon_ports[site.name] = free_port()
        return f"localhost:{self._daemon_ports[site.name]}"

    def kill(self, name: str) -> None:
        """kill -9 a process alone; the supervisor starts it again."""
        process = self.processes[name].process
        assert process is not None
        process.kill()
        process.wait()

    def children(self, name: str) -> list[int]:
        """Return the processes that a process has started, such as SuperExec's ServerApps, with theirs."""
        process = self.processes[name].process
        assert process is not None
        return _descendants(process.pid)

    def wait_for(self, name: str, ready: Callable[[], bool], seconds: float = 60.0) -> None:
        """Return once ``ready``; a process that has ended for good, or time that is over, is an error with its log."""
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                raise DeploymentError(f"{name} is not ready after {seconds:g} s:\n{self.processes[name].tail()}")
            time.sleep(0.1)

    def _start_server(self) -> None:
        host, port = self.address.split(":")
        link, app = self.server.link, self.server.app
        command = [str(_BIN / "flower-superlink"), "--host", host, "--port", port, "--isolation", "process"]
        command += ["--ssl-ca-certfile", str(link / "ca.crt"), "--ssl-certfile", str(link / "server.crt")]
        command += ["--ssl-keyfile", str(link / "server.key"), "--enable-supernode-auth"]
        command += ["--superexec-auth-secret-file", str(link / "superexec.secret")]
        self.add("superlink", [*command, "--database", str(self.folder / "superlink.db")])
        gate = [sys.executable, "-m", "deployment.gate", "--listen", self.gate, "--superlink", self.address]
        self.add("gate", [*gate, "--keys", str(link)])
        command = [str(_BIN / "flower-superexec"), "--runtime-api-address", self.address]
        command += ["--root-certificates", str(app / "ca.crt")]
        self.add("superexec", [*command, "--superexec-auth-secret-file", str(app / "superexec.secret")])

    def _supervise(self) -> None:
        while not self._stopping.wait(0.1):
            with self._lock:
                if self._stopping.is_set():  # while this waited for the lock, everything was ended
                    return
                for process in self.processes.values():
                    process.tend()


def serve_command(data: Path, policy: Path, ledger: Path, threads: int = 1) -> tuple[str, ...]:
    """Return the command of a site's daemon on these files."""
    command = (sys.executable, "-W", "ignore", "-m", "simulations.cli", "site", "serve", "--threads", str(threads))
    return (*command, "--data", str(data), "--policy", str(policy), "--ledger", str(ledger))


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, int(port))) == 0


def message_cpu_seconds(node: Supervised) -> float:
    """Return the CPU time of all that a SuperNode has had started for messages, those that have ended included.

    Its own time and its SuperExec's are left out: they look for work whether there is any or not.
    """
    assert node.process is not None
    ticks = 0
    for pid in _descendants(node.process.pid):
        with contextlib.suppress(OSError):  # it has just ended, and its parent has taken over its time
            own_user, own_system, ended_user, ended_system = map(
                int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]
            )
            ticks += ended_user + ended_system
            if b"flower-superexec" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                ticks += own_user + own_system
    return ticks / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> list[int]:
    found, queue = [], [pid]
    while queue:
        for child in _children(queue.pop()):
            found.append(child)
            queue.append(child)
    return found


def _children(pid: int) -> list[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]
