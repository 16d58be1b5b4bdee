"""Simulated sites: one process plays many of them, on shares of one data set."""

import sys
from collections.abc import Mapping
from functools import lru_cache

import torch
from flwr.app import Context

from client.data import SiteData
from client.site import Site, Workbench
from common import datasets
from common.config import ConfigValue, RunConfig
from common.datasets import Dataset
from common.errors import FederationError
from common.mask import Indices
from simulations.partition import split
from simulations.seeded import SeededRandomness


class SimulatedSites:
    """All sites of a simulation, as this process sees them: shared data, one workbench, seeded randomness."""

    def __init__(self, config: RunConfig, dataset: Dataset, shares: list[Indices]) -> None:
        self._dataset = dataset
        self.shares = shares
        self._seed = config.seed
        # As many models as the server looks back: sites of a cohort come and go, and this process plays them all.
        self._workbench = Workbench(config.device, shelf_size=8)
        # Parallelism comes from processes: with one thread each, sums do not depend on the machine's cores.
        torch.set_num_threads(1)

    @classmethod
    def of(cls, config: RunConfig, sites: int, dataset: Dataset | None = None) -> "SimulatedSites":
        """Load and split the data set that the config names."""
        dataset = dataset or datasets.load(config.dataset)
        return cls(config, dataset, split(dataset.train_targets, sites, config.partition, config.seed))

    @property
    def sizes(self) -> list[int]:
        """How many records each site has."""
        return [int(share.size) for share in self.shares]

    def site(self, number: int) -> Site:
        """Return a site; it is cheap, since it owns nothing but its row numbers."""
        if not 0 <= number < len(self.shares):
            raise FederationError(f"expected a site number from 0 to {len(self.shares) - 1}, got {number}")
        rows = self.shares[number]
        data = SiteData(self._dataset.train_inputs, self._dataset.train_targets, rows, declared_size=rows.size)
        return Site(data, SeededRandomness(self._seed, number), self._workbench)


_provided: SimulatedSites | None = None


def provide(sites: SimulatedSites) -> None:
    """Have this process open these sites whatever a message's run config says: an engine has prepared them."""
    global _provided
    _provided = sites


def open_site(context: Context) -> Site:
    """Open the site of a Flower context: the hook that ``client.app`` finds under ``fedsieve.sites``."""
    number, count = context.node_config.get("partition-id"), context.node_config.get("num-partitions")
    if not isinstance(number, int) or not isinstance(count, int):
        raise FederationError(
            "this node has no site daemon and is not part of a simulation: expected 'partition-id' and "
            f"'num-partitions' in the node config, got {dict(context.node_config)!r}"
        )
    if _provided is None and not _in_a_ray_actor():
        raise FederationError(
            "this node has no site daemon and is not part of a simulation: start one with 'fedsieve site serve' and "
            "name it in the node config (site=HOST:PORT); simulated sites, whose noise is seeded, do not stand in"
        )
    return (_provided or _sites_of(_frozen(context.run_config), count)).site(number)


def _in_a_ray_actor() -> bool:
    """Tell whether Flower's simulation engine runs this: a SuperNode's process has nothing to do with Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _frozen(run_config: Mapping[str, object]) -> tuple[tuple[str, ConfigValue], ...]:
    return tuple(sorted((k, v) for k, v in run_config.items() if isinstance(v, bool | int | float | str)))


@lru_cache(maxsize=1)
def _sites_of(run_config: tuple[tuple[str, ConfigValue], ...], count: int) -> SimulatedSites:
    return SimulatedSites.of(RunConfig.parse(dict(run_config)), count)
