"""What holds for every test."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# One thread a process, here and in the processes that tests start: on tensors as small as these a second thread costs
# more than it computes, and where other work runs every operation waits for it. Said before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where there are more: none spins while another test computes

# Every test process has a Ray of its own, whatever else runs on this machine. The path is short, as sockets need it.
_ray = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
_ray.mkdir(exist_ok=True)
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="r", dir=_ray)
os.environ.pop("RAY_ADDRESS", None)

# Correctness does not depend on how long a busy machine takes for an example.
settings.register_profile("fedsieve", deadline=None)
settings.load_profile("fedsieve")

# Files that take more than ten seconds of a processor, longest first. Files are given out in this order ('make test'),
# so that none of these is left to the end, where the other processes would have nothing to do.
_LONG_FILES = (
    "test_deployment.py",
    "test_ray_grid.py",
    "test_flwr_run.py",
    "test_daemon.py",
    "test_benchmarks.py",
    "test_experiments.py",
    "test_run.py",
    "test_mechanism.py",
    "test_attacks.py",
    "test_docs.py",
    "test_clipping.py",
    "test_enforcement.py",
    "test_cli.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long; keep the order otherwise."""
    order = {name: number for number, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_unconfigure() -> None:
    """Remove the folder of this process's Ray."""
    shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
