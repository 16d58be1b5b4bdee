"""The first run of docs/deployment.md, command by command as it is written there: ``make test-deployment``."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deployment.processes import free_port
from tests.deployment.running import PROJECT

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
    """Return the page's commands in the order in which the parties type them; only names of this machine are put in."""
    server, site, register, start_site, run, plain_server, plain_site, plain_run = BLOCK.findall(PAGE)
    without_3 = "".join(line for line in server.splitlines(keepends=True) if not line.startswith("FEDSIEVE_BIND"))
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
    text = text.replace("/path/to/node.pub", "keys/site-1/node.pub").replace("/path/to", str(folder))
    return text.replace("superlink.example.org", "localhost")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_run_without_docker(tmp_path: Path) -> None:
    given(tmp_path / "given")
    here = tmp_path / "deployment"
    here.mkdir()
    commands = script(tmp_path / "given", docker=False)
    control = free_port()
    for written, free in (("8000", control), ("8443", free_port()), ("9301", free_port()), ("9094", free_port())):
        assert written in commands
        commands = commands.replace(written, str(free))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PYTHONPATH": str(PROJECT), "PATH": path, "FLWR_HOME": str(tmp_path / "flower")}
    with (tmp_path / "log").open("w") as log:
        shell = subprocess.Popen(
            ["bash", "-c", commands],
            cwd=here,
            env={**os.environ, **environment, "FEDSIEVE_SUPERLINK": f"127.0.0.1:{control}"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(500)
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
    text = (tmp_path / "log").read_text()
    assert code == 0, text[-3000:]
    assert "completed" in text
    assert (here / "server" / "runs" / "first" / "checkpoint.npz").is_file()
