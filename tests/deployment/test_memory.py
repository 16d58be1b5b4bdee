"""Fifty rounds with eight sites: nobody's memory grows ('make test-deployment')."""

import contextlib
import threading
from pathlib import Path

import pytest

from tests.deployment.running import Running, deployment, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SITES, ROUNDS, SETTLED = 8, 50, 5
_TOLERANCE = 0.10  # allocators keep what they were given; 0.9 MB a round would show in a daemon, 0.3 MB in a shim


def memory(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith("Rss:"))


def sample(running: Running) -> dict[str, int]:
    """Return the memory of every process of the deployment, and of the ServerApp."""
    pids = {name: one.process.pid for name, one in running.processes.processes.items()}
    for pid in running.server_apps():
        pids["server-app"] = pid
    # The warm helper of a node is what all its shims are forks of; it is the node's own child, they are the helper's.
    for name in list(pids):
        if name.endswith("-node"):
            for child in reversed(running.children(name)):
                with contextlib.suppress(OSError):  # a shim that has just ended
                    if b"warm_node" in Path(f"/proc/{child}/cmdline").read_bytes():
                        pids[name.replace("-node", "-shim")] = child
    return {name: memory(pid) for name, pid in pids.items()}


def test_memory_is_flat_after_round_5(tmp_path: Path) -> None:
    with deployment(tmp_path, limits={"epsilon": "1000.0"}, sites=SITES, rounds=ROUNDS, evaluate_every=10) as running:
        watching = threading.Thread(target=running.run, args=("long",))
        watching.start()
        samples: dict[int, dict[str, int]] = {}
        for number in (SETTLED, 15, 25, 35, ROUNDS - 1):
            wait_until(lambda number=number: len(running.events("long", "round")) >= number, 1800)
            samples[number] = sample(running)
        watching.join(600)
        assert [event["admitted"] for event in running.events("long", "round")] == [SITES] * ROUNDS
    first, last = samples[SETTLED], samples[ROUNDS - 1]
    for name in sorted(first):
        print(f"{name:<16}" + "".join(f"{samples[number][name] / 2**20:9.1f}" for number in samples) + " MiB")
    grown = {name: last[name] / first[name] - 1 for name in first if last[name] > (1 + _TOLERANCE) * first[name]}
    assert not grown, grown
