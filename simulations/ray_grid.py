"""A Flower Grid on long-lived Ray actors: the same ServerApp and ClientApp code, hardly any overhead.

Each actor keeps one model and sees the data set in Ray's shared memory. A round costs one call per actor, which
carries the actor's whole share of the cohort and streams the replies back as they finish.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Before Ray is imported: no telemetry, and its coming treatment of actors without a GPU instead of a warning about it.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from flwr.app import Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import ErrorCode
from ray.exceptions import RayActorError

from client.app import app as client_app
from client.memory import keep_freed_memory
from common.config import ConfigValue, RunConfig
from common.datasets import Dataset
from common.errors import ConfigError
from common.mask import Indices
from simulations import sites as simulated_sites
from simulations.grid import LocalGrid, run_client_app, site_of
from simulations.sites import SimulatedSites

ANSWER_WITHIN = 30  # seconds that a cluster has to let us join

_STREAM_EVERY = 0.05  # seconds: replies that finish closer together than this travel in one object
_MAX_ATTEMPTS = 3


@ray.remote
class SiteActor:
    """Plays any site of the simulation, one at a time."""

    def __init__(self, run_config: Mapping[str, ConfigValue], dataset: Dataset, shares: list[Indices]) -> None:
        keep_freed_memory()
        self._run_config = run_config
        self._sites = len(shares)
        simulated_sites.provide(SimulatedSites(RunConfig.parse(run_config), dataset, shares))

    def answer(self, content: RecordDict, envelopes: list[Metadata]) -> Iterator[list[Message]]:
        """Answer one content as every addressed node; yields the replies in small bunches."""
        bunch, since = [], time.monotonic()
        for envelope in envelopes:
            message = make_message(metadata=envelope, content=content)
            bunch.append(run_client_app(client_app, message, self._sites, self._run_config))
            if time.monotonic() - since > _STREAM_EVERY:
                yield bunch
                bunch, since = [], time.monotonic()
        if bunch:
            yield bunch

    def where(self) -> str:
        """Return the Ray node that the actor has started on."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id


@dataclass(slots=True)
class _Share:
    """What one actor has been asked and has not answered yet."""

    actor: int
    content: RecordDict
    waiting: dict[str, Metadata]
    attempt: int


class RayGrid(LocalGrid):
    """Sites spread over Ray actors."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        *,
        actors: int = 0,
        gpus_per_actor: float = 0.0,
        ray_address: str | None = None,
    ) -> None:
        """Start (or join, by ``ray_address``) Ray and the actors; ``actors`` 0 means one per CPU."""
        super().__init__(config.sites)
        self._owns_ray = start_ray(ray_address)
        try:
            simulated = SimulatedSites.of(config, config.sites, dataset)
            self._sizes = simulated.sizes
            self._arguments = (config.to_mapping(), ray.put(dataset), ray.put(simulated.shares))
            self._resources = _resources(actors, config.cohort_size, gpus_per_actor)
            self._actors = [self._start_actor() for _ in range(self._resources.actors)]
            self.actor_nodes: list[str] = ray.get([actor.where.remote() for actor in self._actors])
        except BaseException:
            self.close()
            raise
        self._shares: dict[Any, _Share] = {}

    def close(self) -> None:
        """Stop the actors, and Ray where this grid started it."""
        if self._owns_ray:
            ray.shutdown()
        else:
            for actor in getattr(self, "_actors", []):
                ray.kill(actor)

    def _start_actor(self) -> Any:
        options = SiteActor.options(  # type: ignore[attr-defined]
            num_cpus=self._resources.cpus, num_gpus=self._resources.gpus, scheduling_strategy="SPREAD"
        )
        return options.remote(*self._arguments)

    def _launch(self, messages: list[Message]) -> None:
        by_content: dict[int, list[Message]] = {}
        for message in messages:
            by_content.setdefault(id(message.content), []).append(message)
        for group in by_content.values():
            content = ray.put(group[0].content)  # once, whatever the size of the cohort
            weights = [self._sizes[site_of(message.metadata.dst_node_id)] for message in group]
            for actor, numbers in enumerate(assign(weights, len(self._actors))):
                if numbers:
                    waiting = {group[n].metadata.message_id: group[n].metadata for n in numbers}
                    self._send(_Share(actor, content, waiting, attempt=1))

    def _send(self, share: _Share) -> None:
        call = self._actors[share.actor].answer.options(num_returns="streaming")
        self._shares[call.remote(share.content, list(share.waiting.values()))] = share

    def _collect(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._shares:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(self._shares), num_returns=1, timeout=left, fetch_local=False)
            if not ready:
                return
            for stream in ready:
                self._take_bunch(stream)

    def _take_bunch(self, stream: Any) -> None:
        share = self._shares[stream]
        try:
            bunch = ray.get(next(stream))
        except StopIteration:
            del self._shares[stream]
            return
        except RayActorError:
            del self._shares[stream]
            self._repeat(share)
            return
        for reply in bunch:
            self._file(share, reply)

    def _file(self, share: _Share, reply: Message) -> None:
        message_id = reply.metadata.reply_to_message_id
        if share.waiting.pop(message_id, None) is not None:
            self._replies[message_id] = reply

    def _repeat(self, share: _Share) -> None:
        """Start a dead actor anew and give it what it had not answered; the sites' randomness is the same again."""
        self._actors[share.actor] = self._start_actor()
        if share.attempt < _MAX_ATTEMPTS:
            self._send(_Share(share.actor, share.content, share.waiting, share.attempt + 1))
            return
        reason = f"the actor died {_MAX_ATTEMPTS} times while this site was waiting for it"
        for envelope in list(share.waiting.values()):
            message = make_message(metadata=envelope, content=RecordDict())
            self._file(share, Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message))

    def _abandon(self) -> None:
        """After a deadline: actors that are still busy are replaced, so that the next round finds all of them free."""
        busy = {share.actor for share in self._shares.values()}
        self._shares.clear()
        for actor in busy:
            ray.kill(self._actors[actor])
            self._actors[actor] = self._start_actor()
        # Starting takes seconds, which must not count against the next round's deadline.
        ray.get([self._actors[actor].where.remote() for actor in busy])


def start_ray(address: str | None) -> bool:
    """Start a Ray of its own, or join the cluster of ``address`` or RAY_ADDRESS; false where this process has one."""
    if ray.is_initialized():
        return False
    asked = address or os.environ.get("RAY_ADDRESS") or "local"
    # Never None: Ray would then join what its note of the last cluster names, dead or somebody else's.
    found = asked if asked == "local" else _cluster_at(asked, "--ray-address" if address else "RAY_ADDRESS")
    for last in (False, False, True):
        try:
            ray.init(address=found, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            break
        except Exception as error:
            # Ray gives its own processes 30 seconds to start, which is too little on a busy machine.
            if "timed out" not in str(error).lower() or last:
                raise
            ray.shutdown()
    return True


# ray.init tries a dead address for more than ten minutes, and inside its C++ only a signal's default action ends it.
_JOIN = """
import signal, sys, ray
signal.alarm(int(sys.argv[2]))
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    print(ray.get_runtime_context().gcs_address)
except Exception as error:
    print(error)
    sys.exit(1)
"""


def _cluster_at(address: str, source: str) -> str:
    """Return HOST:PORT of the cluster at ``address``, which another process could join."""
    reason = "a ray:// address needs Ray's client, which cannot carry a run: expected HOST:PORT"
    if "://" not in address:
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}  # 'auto' would read it
        command = [sys.executable, "-c", _JOIN, address, str(ANSWER_WITHIN)]
        joined = subprocess.run(command, env=environment, capture_output=True, text=True)
        if joined.returncode == 0:
            return joined.stdout.split()[-1]
        reason = joined.stdout.strip(" .\n") or f"it does not answer within {ANSWER_WITHIN} s"
    raise ConfigError(
        f"{source}={address} names no Ray cluster that this machine can join: {reason}. Start one with "
        "'ray start --head', on further machines 'ray start --address HOST:PORT', and run on one of these; or leave "
        f"out {source}, and a Ray is started here"
    )


def assign(weights: Sequence[int], actors: int) -> list[list[int]]:
    """Return which items each actor gets: longest first, each to the actor with the least work so far."""
    loads = [0] * actors
    shares: list[list[int]] = [[] for _ in range(actors)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        actor = loads.index(min(loads))
        shares[actor].append(item)
        loads[actor] += weights[item]
    return shares


@dataclass(frozen=True, slots=True)
class _Resources:
    actors: int
    cpus: float
    gpus: float


def _resources(actors: int, cohort: int, gpus_per_actor: float) -> _Resources:
    cluster = ray.cluster_resources()
    cpus, gpus = cluster.get("CPU", 1.0), cluster.get("GPU", 0.0)
    actors = actors or max(1, min(int(cpus), cohort))
    if gpus_per_actor * actors > gpus:
        raise ConfigError(
            f"{actors} actors with {gpus_per_actor:g} GPUs each need more than the {gpus:g} GPUs of this Ray cluster: "
            "lower --actors or --gpus-per-actor"
        )
    return _Resources(actors, min(1.0, cpus / actors), gpus_per_actor)
