"""A small deployment of plain processes, with a test build of the sites whose noise is that of a simulation."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from client.channel import Access
from client.ledger import Ledger
from client.remote import RemoteSite
from common.config import RunConfig
from common.datasets import Dataset
from deployment.processes import LocalDeployment, descendants
from deployment.superlink import RunStatus
from server.checkpoint import Checkpoint
from server.runlog import Event, read_events
from simulations.demo_sites import DemoDeployment, DemoSite, prepare
from simulations.run import Engine, simulate
from tests.support import small_config, small_dataset

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Running:
    processes: LocalDeployment
    files: DemoDeployment
    config: RunConfig

    def run(self, name: str, **changes: Any) -> RunStatus:
        """See a run through."""
        return self.processes.link.see_through(PROJECT, self.changes(name, **changes), tell=print)

    def changes(self, name: str, **changes: Any) -> dict[str, Any]:
        ours = {
            "name": name,
            "out": str(self.files.runs),
            "dataset": str(self.files.test_set),
            "server-key": str(self.files.server.plan_key),
        }
        given = {key.replace("_", "-"): value for key, value in changes.items()}
        return {**self.config.to_mapping(), **ours, **given}

    def model(self, name: str) -> bytes:
        return Checkpoint.load(self.files.runs / name / "checkpoint.npz").model.tobytes()

    def events(self, name: str, kind: str | None = None) -> list[Event]:
        path = self.files.runs / name / "run.jsonl"
        events = list(read_events(path)) if path.exists() else []
        return [event for event in events if kind in (None, event["event"])]

    def simulated(self, out: Path, **changes: Any) -> bytes:
        """Return the model that a simulation of the same run ends with."""
        config = replace(self.config, out=str(out), name="simulated", server_key="", **changes)
        folder = simulate(config, Engine(in_process=True)).folder
        return Checkpoint.load(folder / "checkpoint.npz").model.tobytes()

    def site(self, number: int) -> RemoteSite:
        """Return a site's daemon, asked as its shim does."""
        site = self.files.sites[number]
        keys = site.keys.node
        address = self.processes.daemon_address(site.local)
        return RemoteSite(
            Access(address=address, ca=keys / "daemon-ca.crt", certificate=keys / "shim.crt", key=keys / "shim.key")
        )

    def process(self, name: str) -> "subprocess.Popen[bytes]":
        """Return a process as it runs now."""
        return self.processes.processes[name].process

    def kill(self, name: str) -> None:
        """kill -9 a process alone; it is started again."""
        process = self.process(name)
        process.kill()
        process.wait()

    def children(self, name: str) -> list[int]:
        """Return what a process has started, and what that has."""
        return descendants(self.process(name).pid)

    def server_apps(self) -> list[int]:
        """Return the processes of running ServerApps."""
        found = []
        for pid in self.children("superexec"):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if b"flwr-serverapp" in command:
                found.append(pid)
        return found

    def charged_rounds(self, site: DemoSite, name: str) -> list[tuple[int, bool]]:
        """Return the rounds of a run that a stopped site has charged, each with whether its release was kept."""
        ledger = Ledger(site.ledger)
        try:
            entries = [entry for entry in ledger.entries() if entry.run.startswith(f"{name}#")]
            return [(entry.round, ledger.release_of(entry) is not None) for entry in entries]
        finally:
            ledger.close()


def open_to_containers(folder: Path) -> None:
    """Let the user of containers pass through the folders above: pytest's are for their owner alone."""
    for parent in (folder, *folder.parents):
        if os.getuid() == 0 and parent.owner() == "root" and str(parent).startswith("/tmp/"):
            parent.chmod(0o711)


def wait_until(ready: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


@contextmanager
def deployment(
    folder: Path, *, dataset: Dataset | None = None, limits: dict[str, str] | None = None, **changes: Any
) -> Iterator[Running]:
    """Run a deployment until the end of the block."""
    config = small_config(folder, **{"sites": 2, "round-deadline": 120.0, **changes})
    files = prepare(folder, dataset or small_dataset(), config, limits={"epsilon": "100.0", **(limits or {})})
    sites = []
    for number, site in enumerate(files.local_sites):
        options = site.daemon_command[site.daemon_command.index("serve") + 1 :]
        test_build = (sys.executable, "-W", "ignore", "-m", "tests.deployment.seeded_site", str(config.seed))
        sites.append(replace(site, daemon_command=(*test_build, str(number), *options)))
    with LocalDeployment(folder, files.server, sites) as processes:
        yield Running(processes, files, config)
    left = [name for name, one in processes.processes.items() if one.runs]
    assert not left, f"still running: {left}"
