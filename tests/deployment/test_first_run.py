"""The first run of docs/deployment.md, command by command as it is written there: ``make test-deployment``."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deployment.processes import QUIET, hold_port, port_of
from simulations.deploy_demo import compose_command, wheels
from tests.deployment.running import PROJECT, open_to_containers

PAGE = (PROJECT / "docs" / "deployment.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- run by: tests/deployment/test_first_run.py -->\n```sh\n(.*?)^```$", re.M | re.S)
POLICY = re.compile(r"^```toml\n(.*?)^```$", re.M | re.S)
WAIT_FOR_THE_SUPERLINK = "until fedsieve deploy status; do sleep 1; done\n"


def given(folder: Path) -> None:
    """Write what the page takes from /path/to: records, a test set, and the policy that it shows."""
    rng = np.random.default_rng(1)
    inputs = rng.random((300, 1, 28, 28), np.float32)
    targets = rng.integers(0, 10, 300)
    folder.mkdir()
    for name in ("records.npz", "test.npz"):
        np.savez(
            folder / name,
            train_inputs=inputs,
            train_targets=targets,
            test_inputs=inputs[:50],
            test_targets=targets[:50],
        )
    (policy,) = POLICY.findall(PAGE)
    (folder / "site.toml").write_text(policy)


def script(folder: Path, *, docker: bool) -> str:
    """Return the page's commands in the order in which the parties type them, with names of this machine put in."""
    server, site, register, start_site, run, plain_server, plain_site, plain_run = BLOCK.findall(PAGE)
    without_3 = "".join(line for line in server.splitlines(keepends=True) if "docker-compose" not in line)
    fetch_key = f"""sed -i "s/\\"\\.\\.\\.\\"/\\"$(cat public/plan.pub)\\"/" {folder}/site.toml\n"""
    parts = [
        server if docker else without_3 + plain_server,
        "cp -r keys/server/public public\n",
        fetch_key,
        site,
        register.replace("fedsieve deploy register", WAIT_FOR_THE_SUPERLINK + "fedsieve deploy register"),
        start_site if docker else plain_site,
        (run if docker else plain_run).replace("--name first", "--name first --set rounds=3"),
    ]
    text = "set -euo pipefail\n" + "".join(parts)
    return text.replace("/path/to/node.pub", "keys/site-1/node.pub").replace("/path/to", str(folder))


def follow(commands: str, folder: Path, **environment: str) -> str:
    """Run commands in a new folder, end what they leave running, and return what was printed."""
    here = folder / "deployment"
    here.mkdir()
    environment["PYTHONPATH"] = str(PROJECT)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment["FLWR_HOME"] = str(folder / "flower")
    with (folder / "log").open("w") as log:
        shell = subprocess.Popen(
            ["bash", "-c", commands],
            cwd=here,
            env={**os.environ, **QUIET, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(500)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
    text = (folder / "log").read_text()
    assert code == 0, text[-3000:]
    return text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_run_without_docker(tmp_path: Path) -> None:
    given(tmp_path / "given")
    commands = script(tmp_path / "given", docker=False).replace("superlink.example.org", "localhost")
    with contextlib.ExitStack() as held:
        ports = {written: port_of(held.enter_context(hold_port())) for written in ("8000", "8443", "9301", "9094")}
        for written, free in ports.items():
            assert written in commands
            commands = commands.replace(written, str(free))
        assert "completed" in follow(commands, tmp_path, FEDSIEVE_SUPERLINK=f"127.0.0.1:{ports['8000']}")
    assert (tmp_path / "deployment" / "server" / "runs" / "first" / "checkpoint.npz").is_file()


@pytest.mark.docker
@pytest.mark.timeout(600)
def test_the_first_run_in_containers(tmp_path: Path) -> None:
    open_to_containers(tmp_path)
    given(tmp_path / "given")
    compose = " ".join(compose_command())
    commands = script(tmp_path / "given", docker=True).replace("superlink.example.org", "gate")
    commands = commands.replace("docker-compose", compose)
    user = {} if os.getuid() == 0 else {"FEDSIEVE_UID": str(os.getuid())}
    if os.getuid() == 0:  # as the page tells root
        commands = re.sub(
            "(?m)^(FEDSIEVE_(BIND|GATE))", r"chown -R 10001:10001 keys sites server || true\n\1", commands
        )
    with hold_port() as one, hold_port() as other:  # no longer: Docker itself listens there
        control, gate = port_of(one), port_of(other)
    project = {
        "COMPOSE_FILE": str(PROJECT / "docker-compose.yml"),
        "COMPOSE_PROJECT_NAME": "fedsieve-first-run",
        "FEDSIEVE_FOLDER": str(tmp_path / "deployment"),
        "FEDSIEVE_CONTROL_PORT": str(control),
        "FEDSIEVE_PORT": str(gate),
    }
    try:
        with wheels():
            text = follow(commands, tmp_path, FEDSIEVE_SUPERLINK=f"127.0.0.1:{control}", **project, **user)
    finally:
        down = [*compose_command(), "down", "--volumes", "--timeout", "10"]
        subprocess.run(down, env={**os.environ, **project}, check=True)
    assert "completed" in text
