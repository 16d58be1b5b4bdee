"""What a message costs a site's node: our shim before its daemon, against a ClientApp that imports torch.

Both are real SuperNodes of one real deployment on this machine, one after the other: ours as ``deployment.warm_node``
runs it, and Flower's as it comes. Counted is the CPU time of all that a node starts for the same number of messages.
The training itself is the daemon's and counts in neither; nor does it that a node looks for work all the time.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.datasets import Dataset
from deployment.processes import LocalDeployment, LocalSite, Supervised, message_cpu_seconds
from simulations.demo_sites import DemoDeployment, prepare
from simulations.run import config_with

_PROJECT = Path(__file__).resolve().parents[2]
_PLAIN = Path(__file__).resolve().parent / "plain_flower"
_MESSAGES = 4


@dataclass(frozen=True, slots=True)
class ShimCost:
    """CPU seconds of a node for one message."""

    ours: float
    plain: float

    @property
    def ratio(self) -> float:
        """How many times less ours costs."""
        return self.plain / self.ours


def measure(folder: Path, messages: int = _MESSAGES) -> ShimCost:
    """Run both nodes and return what a message costs each."""
    rng = np.random.default_rng(1)
    inputs, targets = rng.normal(size=(64, 12)).astype(np.float32), np.arange(64) % 3
    dataset = Dataset(inputs, targets, inputs[:8], targets[:8])
    settings = {"model": "mlp:12-3", "sites": 1, "rounds": messages - 1, "steps-per-round": 1, "sampling-rate": 0.5}
    config = config_with({**settings, "epsilon": 50.0, "noise-multiplier": 1.0, "evaluate-every": 0, "name": "shim"})
    files = prepare(folder, dataset, config)
    with LocalDeployment(folder, files.server, files.local_sites) as deployment:
        site = deployment.sites[0]
        node = deployment.processes[f"{site.name}-node"]
        _wait_until_online(deployment)
        before = _settled(node)
        # As many messages as asked for: one question who the site is, and the rounds.
        deployment.link.see_through(_PROJECT, {**config.to_mapping(), **_places(files)})
        ours = (message_cpu_seconds(node) - before) / messages
        deployment.remove(node.name)
        plain = deployment.add(f"{site.name}-plain", _plain_command(deployment, site))
        _wait_until_online(deployment)
        before = _settled(plain)
        deployment.link.see_through(_PLAIN, {"messages": messages})
        return ShimCost(ours, (message_cpu_seconds(plain) - before) / messages)


def _settled(node: Supervised) -> float:
    """Return the CPU time so far, once what a node prepares before its first message is done."""
    before = -1.0
    while (now := message_cpu_seconds(node)) != before:
        before = now
        time.sleep(2.0)
    return now


def _places(files: DemoDeployment) -> dict[str, str]:
    return {"out": str(files.runs), "server-key": str(files.server.plan_key), "dataset": str(files.test_set)}


def _plain_command(deployment: LocalDeployment, site: LocalSite) -> Sequence[str]:
    """Return the command of the same SuperNode, as Flower's documentation has it."""
    ours = list(deployment.node_command(site))
    return ["flower-supernode", *ours[ours.index("--superlink") :]]


def _wait_until_online(deployment: LocalDeployment) -> None:
    def online() -> bool:
        return [node.status for node in deployment.link.nodes()] == ["online"]

    deployment.wait_for("superlink", online, 120)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=_MESSAGES, help=f"messages to each node (default {_MESSAGES})")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cost = measure(Path(folder), options.messages)
    print(f"CPU of a node for one message: ours {cost.ours:.3f} s, plain Flower with torch {cost.plain:.3f} s")
    print(f"BAR shim_cpu_ratio={cost.ratio:.2f}")


if __name__ == "__main__":
    main()
