"""The containers of docker-compose.yml, built and run for real: ``make test-docker``."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployment.counters import compare
from deployment.superlink import RunStatus, SuperLink
from server.runlog import read_events
from simulations.demo_sites import DemoDeployment, prepare
from simulations.deploy_demo import Compose, containers
from tests.deployment.running import PROJECT, open_to_containers, wait_until
from tests.support import SMALL_MODEL, small_config, small_dataset

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
PLACES = {"out": "/state/runs", "dataset": "/test/test.npz", "server-key": "/keys/plan.key"}


class Stack:
    """The running containers of a small deployment."""

    def __init__(self, compose: Compose, files: DemoDeployment, link: SuperLink) -> None:
        self.compose, self.files, self.link = compose, files, link

    def run(self, name: str, **changes: Any) -> RunStatus:
        config = small_config(self.files.folder, sites=2, rounds=3, **{"round-deadline": 120.0, **changes})
        return self.link.see_through(PROJECT, {**config.to_mapping(), **PLACES, "name": name}, tell=print)

    def container(self, service: str) -> dict[str, Any]:
        container = self.compose.output("ps", "-q", service).strip()
        described: list[dict[str, Any]] = json.loads(docker("inspect", container))
        return described[0]

    def inside(self, service: str, *command: str) -> str:
        return self.compose.output("exec", "-T", service, *command)


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("containers")
    open_to_containers(folder)
    config = small_config(folder, sites=2)
    files = prepare(folder / "files", small_dataset(), config, hosts=("superlink", "gate"), limits={"epsilon": "100"})
    with containers(files, "fedsieve-test") as compose:
        link = SuperLink(f"127.0.0.1:{compose.control_port}", files.server.ca)
        compose.register_all(files, link)
        yield Stack(compose, files, link)


def test_a_training_through_containers(stack: Stack, tmp_path: Path) -> None:
    status = stack.run("whole")
    log = tmp_path / "run.jsonl"
    log.write_text(stack.inside("superexec", "cat", "/state/runs/whole/run.jsonl"))
    events = list(read_events(log))
    assert [event["event"] for event in events] == ["run", "round", "round", "round", "end"]
    assert events[-1]["accuracy"] > 0.8
    assert compare(events, status).ratio == pytest.approx(1, abs=0.03)


def test_a_killed_superexec_is_started_again_and_the_run_goes_on(stack: Stack) -> None:
    """Takes the ServerApp with it; the command that watches the run submits it again from its checkpoint."""
    config = small_config(stack.files.folder, sites=2, rounds=3, **{"round-deadline": 120.0})
    changes = {**config.to_mapping(), **PLACES, "name": "killed"}
    stack.link.start(PROJECT, changes)
    log = "/state/runs/killed/run.jsonl"
    wait_until(lambda: '"event":"round"' in stack.inside("superexec", "sh", "-c", f"cat {log} || true"), 240)
    docker("kill", "--signal", "KILL", stack.container("superexec")["Id"])
    docker("kill", "--signal", "KILL", stack.container("superlink")["Id"])
    stack.compose("up", "--detach")  # 'docker kill' counts as the operator's will, which no restart policy opposes
    stack.link.wait_until_ready(120)
    stack.link.see_through(PROJECT, {**changes, "resume": True}, tell=print)
    events = stack.inside("superexec", "cat", log)
    assert events.count('"event":"resume"') == 1 and events.count('"event":"round"') == 3
    for site in ("site-1", "site-2"):
        status = stack.inside(
            site, "fedsieve", "site", "status", "--address", "localhost:9301", "--tls-ca", "/keys/daemon-ca.crt",
            "--tls-certificate", "/keys/operator.crt", "--tls-key", "/keys/operator.key",
        )  # fmt: skip
        assert "6 charges" in status  # three rounds of this run and three of the one before


@pytest.mark.parametrize("service", ["superlink", "gate", "superexec", "node-1", "site-1"])
def test_containers_are_locked_down(stack: Stack, service: str) -> None:
    described = stack.container(service)
    host = described["HostConfig"]
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and "no-new-privileges:true" in host["SecurityOpt"]
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert host["Memory"] > 0 and host["PidsLimit"] > 0 and host["NanoCpus"] > 0
    assert "Healthcheck" in described["Config"]
    assert stack.inside(service, "id", "-u").strip() not in ("", "0")
    writable = [mount["Destination"] for mount in described["Mounts"] if mount["RW"]]
    assert set(writable) <= {"/state", "/ledger"}
    wait_until(lambda: stack.container(service)["State"]["Health"]["Status"] == "healthy", 180)


def test_images_hold_neither_data_nor_keys_nor_more_than_they_need() -> None:
    listing = {
        name: docker("run", "--rm", "--entrypoint", "find", f"fedsieve-{name}", "/opt", "/state", "/ledger", "/tmp")
        for name in ("link", "node", "app", "site")
    }
    for name, files in listing.items():
        ours = [file for file in files.splitlines() if "/site-packages/" not in file or "/simulations/" in file]
        assert not [file for file in ours if file.endswith((".npz", ".key", ".pem", ".secret", ".ledger", ".whl"))], (
            name
        )
    for name in ("link", "node"):
        assert "/torch/__init__.py" not in listing[name] and "/ray/__init__.py" not in listing[name]
        assert "/client/site.py" not in listing[name]  # what sees records is at the site alone
    assert "/torch/__init__.py" in listing["site"] and "/client/site.py" in listing["site"]
    sizes = {name: int(json.loads(docker("image", "inspect", f"fedsieve-{name}"))[0]["Size"]) for name in listing}
    assert sizes["node"] * 2 < sizes["site"]


def test_a_site_has_no_way_out(stack: Stack) -> None:
    look = "import socket; socket.create_connection(('gate', 8443), 3)"
    with pytest.raises(Exception, match="failed"):
        stack.inside("site-1", "python", "-c", look)
    stack.inside("node-1", "python", "-c", look)  # the near miss: its node has one, to the gate
    with pytest.raises(Exception, match="failed"):
        stack.inside("node-1", "python", "-c", look.replace("gate", "superlink").replace("8443", "8000"))


def test_other_sites_and_a_gpu_by_override(stack: Stack) -> None:
    four = stack.compose.output("--profile", "four-sites", "config", "--services").split()
    assert {"site-3", "node-3", "site-4", "node-4"} <= set(four)
    gpu = yaml.safe_load(stack.compose.output("-f", "docker-compose.yml", "-f", "docker-compose.gpu.yml", "config"))
    for site in ("site-1", "site-2"):
        (device,) = gpu["services"][site]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert SMALL_MODEL in stack.inside("site-1", "cat", "/policy/site.toml")
