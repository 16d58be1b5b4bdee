"""A server killed at any moment goes on from its checkpoint to the same end."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from server.checkpoint import Checkpoint
from simulations.run import Engine, config_of_run, simulate
from tests.support import small_config

SERVER = """
import sys, time
from pathlib import Path
from simulations.run import Engine, simulate
from tests.support import small_config

def wait_to_be_killed(event):
    if event.get("round", 0) >= 15:
        time.sleep(600)

config = small_config(Path(sys.argv[1]), name="x", rounds=20, server_optimizer="adam")
simulate(config, Engine(in_process=True), (wait_to_be_killed,))
"""


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_sigkill_in_the_middle(tmp_path: Path) -> None:
    whole = simulate(
        small_config(tmp_path / "whole", name="x", rounds=20, server_optimizer="adam"), Engine(in_process=True)
    )
    folder = tmp_path / "killed" / "x"
    command = [sys.executable, "-W", "ignore", "-c", SERVER, str(folder.parent)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=os.environ)
    killed_after = random.randrange(3, 14)  # lines of the log: any moment of any round
    while process.poll() is None and lines_of(folder / "run.jsonl") < killed_after:
        time.sleep(0.02)
    time.sleep(random.uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    process.wait()
    rounds_done = Checkpoint.load(folder / "checkpoint.npz").rounds_done
    assert 0 < rounds_done < 20, "the server was not killed in the middle"
    resumed = simulate(config_of_run(folder), Engine(in_process=True))
    assert resumed.model.tobytes() == whole.model.tobytes()
    assert (resumed.epsilon, resumed.uplink_bytes) == (whole.epsilon, whole.uplink_bytes)
