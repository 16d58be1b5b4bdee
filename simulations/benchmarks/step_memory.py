"""What a training step needs in memory at its peak: each method of the step benchmark in a process of its own.

``python -m simulations.benchmarks.step_memory MODEL METHOD BATCH DENSITY LAYOUT`` prints it in bytes.
"""

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import torch

from common.errors import FedsieveError
from simulations.benchmarks.step_methods import Task
from simulations.benchmarks.step_models import MODELS, random_mask, size_of
from simulations.benchmarks.step_peers import METHODS

_HERE = "simulations.benchmarks.step_memory"
_PROJECT = Path(__file__).resolve().parents[2]
_STEPS = 3


def peak_apart(model: str, method: str, batch: int, density: float, layout: str) -> int:
    """Return the peak memory of a step in bytes, measured in a new process."""
    command = [sys.executable, "-W", "ignore", "-m", _HERE, model, method, str(batch), str(density), layout]
    # Large blocks go back to the system as soon as they are freed: the peak is then what was in use at one time.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=_PROJECT, env=environment, check=False)
    if done.returncode:
        raise FedsieveError(f"{method} failed at {model} when its memory was measured:\n{done.stdout}{done.stderr}")
    return int(done.stdout.splitlines()[-1])


def _peak(model_name: str, method: str, batch: int, density: float, layout: str) -> int:
    """Return by how much the resident memory of this process grows from before the model is built to its peak."""
    with contextlib.suppress(ImportError):
        import backpack.extensions  # noqa: F401 - imported before the measurement begins, like all the others
    torch.set_num_threads(1)
    model = MODELS[model_name]
    inputs, targets = model.batch(batch, screened=False)
    mask = random_mask(size_of(model.network()), density)
    task = Task(model, mask, clip_norm=1.0, rate=1e-4 / batch)
    # A first step loads code and lets libraries set up their buffers: megabytes that are not the method's data.
    METHODS[method].build(task, layout)(inputs[:2], targets[:2])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    step = METHODS[method].build(task, layout)
    for _ in range(_STEPS):
        step(inputs, targets)
    # Not getrusage: its maximum includes the process that started this one, which was large.
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """Return a field of this process's status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise FedsieveError(f"expected {field} in /proc/self/status: memory is measured on Linux only")


if __name__ == "__main__":
    name, method, batch, density, layout = sys.argv[1:]
    print(_peak(name, method, int(batch), float(density), layout))
