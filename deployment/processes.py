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
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from common.errors import DeploymentError
from deployment.keys import ServerKeys, SiteKeys
from deployment.superlink import SuperLink

_BIN = Path(sys.executable).parent
_GRACE_SECONDS = 10.0  # for a process to end by itself
_PAUSE_SECONDS = 1.0  # between two starts of a process
_LAST = ("gate", "superlink")
_PROC = Path("/proc")
# No process phones home or installs anything.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
_LOOK_OFTEN = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}  # seconds: what starts, starts soon


@dataclass(frozen=True, slots=True)
class LocalSite:
    """One site: its keys, and the command of its daemon without the address and the keys to serve with."""

    name: str
    keys: SiteKeys
    daemon_command: tuple[str, ...]


class Supervised:
    """A process that is started, and started again whenever it has ended."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.starts = 0
        self._command = command
        self._environment = environment
        self._log = log
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._start()

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def tend(self) -> None:
        """Start the process again if it has ended and did not start a moment ago."""
        if not self.runs and time.monotonic() >= self._next_start:
            self._start()

    def end(self, number: int) -> None:
        """Send a signal to the process and to all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait(self, seconds: float) -> None:
        """Return once the process has ended, or after ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def tail(self) -> str:
        """Return the last 15 lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])

    def _start(self) -> None:
        with self._log.open("ab") as output:
            # A session of its own: whatever it starts can be ended with it, and Ctrl-C reaches the supervisor alone.
            self.process = subprocess.Popen(
                self._command,
                env={**os.environ, **self._environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.starts += 1
        self._next_start = time.monotonic() + _PAUSE_SECONDS


class LocalDeployment:
    """All processes of a deployment; a context manager that ends them."""

    def __init__(self, folder: Path, server: ServerKeys, sites: Sequence[LocalSite]) -> None:
        self.folder = folder
        self._held: list[socket.socket] = []
        self.address = self._new_address()  # for the operator
        self.gate = self._new_address()  # for sites
        self.server = server
        self.sites = sites
        self.link = SuperLink(self.address, server.ca)
        self.processes: dict[str, Supervised] = {}
        self._daemons = {site.name: self._new_address() for site in sites}
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> "LocalDeployment":
        try:
            self._start_server()
            for site in self.sites:
                self.add_daemon(site)
            threading.Thread(target=self._supervise).start()
            self.wait_for("superlink", self.link.answers)
            self.wait_for("gate", self._gate_answers)
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
            _end([process for name, process in self.processes.items() if name not in _LAST])
            for name in _LAST:
                if name in self.processes:
                    self.processes[name].end(signal.SIGKILL)
                    self.processes[name].wait(_GRACE_SECONDS)
        for held in self._held:
            held.close()

    def add(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Supervised:
        """Start a process and keep it going."""
        home = self.folder / "flower" / name
        home.mkdir(parents=True, exist_ok=True)
        path = f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**QUIET, "FLWR_HOME": str(home), "PATH": path, **(environment or {})}
        with self._lock:
            process = Supervised(name, command, environment, self.folder / "logs" / f"{name}.log")
            self.processes[name] = process
        return process

    def add_daemon(self, site: LocalSite) -> Supervised:
        """Start a site's daemon."""
        keys = site.keys.daemon
        files = ("--tls-ca", "daemon-ca.crt", "--tls-certificate", "daemon.crt", "--tls-key", "daemon.key")
        options = [word if word.startswith("--") else str(keys / word) for word in files]
        return self.add(f"{site.name}-daemon", [*site.daemon_command, "--listen", self.daemon_address(site), *options])

    def remove(self, name: str) -> None:
        """End a process for good."""
        with self._lock:
            _end([self.processes.pop(name)])

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
        command += ["--root-certificates", str(keys / "ca.crt"), "--port", self._new_address().split(":")[1]]
        command += ["--auth-supernode-private-key", str(keys / "node.key"), "--node-config", config]
        return command

    def daemon_address(self, site: LocalSite) -> str:
        """Return where a site's daemon listens."""
        return self._daemons[site.name]

    def wait_for(self, name: str, ready: Callable[[], bool], seconds: float = 60.0) -> None:
        """Return once ``ready``; a process that ends instead, or is not ready in time, is an error with its log."""
        process = self.processes[name]
        starts, deadline = process.starts, time.monotonic() + seconds
        while not ready():
            ended = process.starts > starts or not process.runs
            if ended or time.monotonic() >= deadline:
                problem = "ended while it was waited for" if ended else f"is not ready after {seconds:g} s"
                raise DeploymentError(f"{name} {problem}; its log ends so:\n{process.tail()}")
            time.sleep(0.1)

    def _new_address(self) -> str:
        """Return an address that nobody else is given as long as the deployment is there."""
        held = hold_port()
        self._held.append(held)
        return f"127.0.0.1:{port_of(held)}"

    def _gate_answers(self) -> bool:
        """Tell whether the gate answers, and nobody else in its place, and has found the SuperLink."""
        trust = ssl.create_default_context(cafile=str(self.server.ca))
        try:
            return httpx.get(f"https://{self.gate}/health", verify=trust, trust_env=False).is_success
        except httpx.TransportError:
            return False

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
        command += ["--superexec-auth-secret-file", str(app / "superexec.secret")]
        self.add("superexec", command, _LOOK_OFTEN)

    def _supervise(self) -> None:
        while not self._stopping.wait(0.1):
            with self._lock:
                if self._stopping.is_set():  # while this waited for the lock, everything was ended
                    return
                for process in self.processes.values():
                    process.tend()


def serve_command(data: Path, policy: Path, ledger: Path, declared_size: int) -> tuple[str, ...]:
    """Return the command of a site's daemon on these files."""
    command = (sys.executable, "-W", "ignore", "-m", "simulations.cli", "site", "serve", "--threads", "1")
    files = ("--data", str(data), "--policy", str(policy), "--ledger", str(ledger))
    return (*command, *files, "--declared-size", str(declared_size))


def hold_port() -> socket.socket:
    """Hold a port of 127.0.0.1 until the socket is closed: the system gives it to nobody who asks for any port.

    Whoever names it can listen there all the same, as servers set SO_REUSEADDR, and so can its next start.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
    held.bind(("127.0.0.1", 0))
    return held


def port_of(held: socket.socket) -> int:
    """Return the port that a socket is bound to."""
    return int(held.getsockname()[1])


def _end(processes: Sequence[Supervised]) -> None:
    """End processes: at their own pace for a while, then by force."""
    for process in processes:
        process.end(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        process.wait(deadline - time.monotonic())
    for process in processes:
        process.end(signal.SIGKILL)
        process.wait(_GRACE_SECONDS)


def message_cpu_seconds(node: Supervised) -> float:
    """Return the CPU time of all that a SuperNode has had started for messages, those that have ended included.

    Its own time and its SuperExec's are left out: they look for work whether there is any or not.
    """
    ticks = 0
    for pid in descendants(node.process.pid):
        with contextlib.suppress(OSError):  # it has just ended, and its parent has taken over its time
            own_user, own_system, ended_user, ended_system = map(
                int, (_PROC / f"{pid}" / "stat").read_text().rsplit(")", 1)[1].split()[11:15]
            )
            ticks += ended_user + ended_system
            if b"flower-superexec" not in (_PROC / f"{pid}" / "cmdline").read_bytes():
                ticks += own_user + own_system
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, such as SuperExec's ServerApps, and theirs."""
    found = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in (_PROC / f"{pid}" / "task" / f"{pid}" / "children").read_text().split()]
    except OSError:  # it has just ended
        return []
