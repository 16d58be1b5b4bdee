"""``flwr run .``: the same ServerApp and ClientApp on Flower's own simulation engine."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.datasets import SHIPPED_FOLDER
from deployment.processes import hold_port, port_of
from server.checkpoint import Checkpoint
from server.runlog import read_events
from simulations.run import Engine, config_of_run, config_with, simulate

PROJECT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Give Flower a home of its own, keep it offline, and have the SuperLink up that ``flwr run`` would start.

    It would give it 15 seconds to start, which is too little on a busy machine.
    """
    home = tmp_path_factory.mktemp("flower")
    held = [hold_port(), hold_port()]  # the usual ones may belong to somebody else's SuperLink
    port, control_port = (str(port_of(one)) for one in held)
    environment = {
        **os.environ,
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port,
        "FLWR_LOCAL_CONTROL_API_PORT": control_port,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FEDSIEVE_CACHE": str(home / "cache"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    command = [str(BIN / "flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--control-api-address", f"127.0.0.1:{control_port}", "--host", "127.0.0.1", "--port", port]
    with (home / "superlink.log").open("w") as log:
        superlink = subprocess.Popen(
            [*command, "--database", str(home / "state.db")], env=environment, stdout=log, stderr=log
        )
    try:
        while not is_up(f"http://127.0.0.1:{port}/health"):
            assert superlink.poll() is None, (home / "superlink.log").read_text()
            time.sleep(0.1)
        yield environment
    finally:
        superlink.terminate()
        superlink.wait()
        for one in held:
            one.close()


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def flwr_run(environment: dict[str, str], settings: str) -> str:
    command = [
        BIN / "flwr", "run", ".", "--stream", "--run-config", settings, "--federation-config", "num-supernodes=3",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_flwr_run_gives_the_same_model_as_our_engine(tmp_path: Path, flower: dict[str, str]) -> None:
    dataset = SHIPPED_FOLDER / "fashion-mnist-12k.npz"
    settings = f'rounds=2 sites=3 steps-per-round=1 dataset="{dataset}" out="{tmp_path}" name="by-flower"'
    output = flwr_run(flower, settings)
    folder = tmp_path / "by-flower"
    deadline = time.monotonic() + 60
    while not (folder / "run.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert (folder / "run.jsonl").exists(), output
    assert "Starting local SuperLink" not in output, "it did not find ours"
    events = list(read_events(folder / "run.jsonl"))
    assert [event["event"] for event in events] == ["run", "round", "round", "end"], output
    config = config_of_run(folder).to_mapping()
    ours = simulate(config_with({**config, "name": "ours", "resume": False}), Engine(in_process=True))
    models = [Checkpoint.load(one / "checkpoint.npz").model.tobytes() for one in (folder, ours.folder)]
    assert models[0] == models[1]
    # Message ids differ in length between the engines; everything else of a message does not.
    ours_end, flower_end = list(read_events(ours.folder / "run.jsonl"))[-1], events[-1]
    for part in ("index", "values", "header"):
        assert ours_end["uplink"][part] == flower_end["uplink"][part]
    assert ours_end["uplink"]["framing"] == pytest.approx(flower_end["uplink"]["framing"], rel=0.2)


def test_a_data_set_that_the_bundle_does_not_carry_is_an_error_that_helps(
    tmp_path: Path, flower: dict[str, str]
) -> None:
    output = flwr_run(flower, f'rounds=1 sites=3 out="{tmp_path}" name="x"')
    assert "fedsieve data get fashion-mnist-12k" in output
    assert not (tmp_path / "x").exists()
