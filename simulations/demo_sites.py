"""The files of a deployment on shipped data: keys, and for each pretended organisation its records, policy and ledger.

::

    FOLDER/keys/server, FOLDER/keys/site-1, ...      as deployment.keys writes them
    FOLDER/sites/site-1/data/records.npz             the site's records
    FOLDER/sites/site-1/policy/site.toml             what it allows
    FOLDER/sites/site-1/ledger/site.ledger           what it has spent
    FOLDER/server/test/test.npz                      the server's own test set
    FOLDER/server/runs/                              the folders of runs
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client.ledger import Ledger
from common.config import RunConfig
from common.datasets import Dataset
from deployment.keys import ServerKeys, SiteKeys
from deployment.processes import LocalSite, serve_command
from simulations.partition import split

_HERE = ("localhost", "127.0.0.1")
_DAYS = 30


@dataclass(frozen=True, slots=True)
class DemoSite:
    """One pretended organisation."""

    name: str
    folder: Path
    keys: SiteKeys
    declared_size: int

    @property
    def data(self) -> Path:
        """Its records."""
        return self.folder / "data" / "records.npz"

    @property
    def policy(self) -> Path:
        """What it allows."""
        return self.folder / "policy" / "site.toml"

    @property
    def ledger(self) -> Path:
        """What it has spent."""
        return self.folder / "ledger" / "site.ledger"

    @property
    def local(self) -> LocalSite:
        """How it runs as plain processes."""
        return LocalSite(self.name, self.keys, serve_command(self.data, self.policy, self.ledger, self.declared_size))


@dataclass(frozen=True, slots=True)
class DemoDeployment:
    """All files of a deployment."""

    folder: Path
    server: ServerKeys
    sites: Sequence[DemoSite]

    @property
    def test_set(self) -> Path:
        """The server's own test set."""
        return self.folder / "server" / "test" / "test.npz"

    @property
    def runs(self) -> Path:
        """Where the ServerApp writes the folders of runs."""
        return self.folder / "server" / "runs"

    @property
    def local_sites(self) -> list[LocalSite]:
        """How the sites run as plain processes."""
        return [site.local for site in self.sites]


def prepare(
    folder: Path,
    dataset: Dataset,
    config: RunConfig,
    *,
    hosts: Sequence[str] = (),
    limits: Mapping[str, str] | None = None,
) -> DemoDeployment:
    """Write the files of a deployment of ``config.sites`` sites that share ``dataset`` as a simulation would.

    ``hosts`` are further names of the SuperLink; ``limits`` further lines of every policy, as TOML.
    """
    server = ServerKeys.create(folder / "keys" / "server", (*hosts, *_HERE), _DAYS)
    plan_key = (server.public / "plan.pub").read_text().strip()
    policy = {
        "epsilon": f"{config.epsilon:g}",
        "delta": f"{config.delta:g}",
        "models": f'["{config.model}"]',
        "max-steps-per-round": f"{config.steps_per_round}",
        "server-key": f'"{plan_key}"',
        **(limits or {}),
    }
    sites = []
    shares = split(dataset.train_targets, config.sites, config.partition, config.seed)
    for number, rows in enumerate(shares, start=1):
        name = f"site-{number}"
        keys = SiteKeys.create(folder / "keys" / name, server.ca, (name, *_HERE), _DAYS)
        site = DemoSite(name, folder / "sites" / name, keys, len(dataset.train_targets) // config.sites)
        for file in (site.data, site.policy, site.ledger):
            file.parent.mkdir(parents=True)
        _save(site.data, dataset.train_inputs[rows], dataset.train_targets[rows], dataset)
        site.policy.write_text("".join(f"{key} = {value}\n" for key, value in policy.items()))
        Ledger.create(site.ledger).close()
        sites.append(site)
    deployment = DemoDeployment(folder, server, sites)
    deployment.test_set.parent.mkdir(parents=True)
    deployment.runs.mkdir()
    _save(deployment.test_set, dataset.test_inputs, dataset.test_targets, dataset)
    return deployment


def _save(path: Path, inputs: NDArray[np.float32], targets: NDArray[np.int64], dataset: Dataset) -> None:
    """Write records as a data set's file; sites and the server test on what is public anyway."""
    np.savez(
        path,
        train_inputs=inputs,
        train_targets=targets,
        test_inputs=dataset.test_inputs,
        test_targets=dataset.test_targets,
    )
