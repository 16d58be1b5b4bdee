"""What an operator asks of a SuperLink: start a run and see it through, list runs and nodes, read logs.

Speaks Flower's Control API, as the ``flwr`` command does, with the address and the CA given on the spot.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from common.config import ConfigValue
from common.errors import ConfigError, DeploymentError

_POLL_SECONDS = 1.0
_LINK_PATIENCE = 300.0  # seconds for a SuperLink that does not answer to be restarted
_MOST_ATTEMPTS = 5
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as the SuperLink sees it; bytes are those of its own counters, from its point of view."""

    run_id: int
    status: str
    outcome: str
    details: str
    pending_at: str
    bytes_sent: int
    bytes_received: int

    @property
    def finished(self) -> bool:
        """Whether it is over, one way or another."""
        return self.status == "finished"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A registered SuperNode."""

    node_id: int
    name: str
    status: str


class SuperLink:
    """A SuperLink's Control API at ``address``, whose certificate ``ca`` must have signed."""

    def __init__(self, address: str, ca: Path) -> None:
        self.address = address
        try:
            self._client = ControlHttpClient.from_server_address(
                address, False, ca.read_bytes(), [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use the CA certificate {ca}: {error}") from error

    def register(self, public_key: Path, name: str = "") -> int:
        """Let the SuperNode with this public key in, and return its node id."""
        try:
            key = load_ssh_public_key(public_key.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the node's public key {public_key}: {error}") from error
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError(f"expected the node.pub that 'fedsieve keys add-site' made, got {public_key}")
        with self._asking():
            reply = self._client.RegisterNode(
                RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name or public_key.parent.name)
            )
        return int(reply.node_id)

    def unregister(self, node_id: int) -> None:
        """Let a SuperNode in no more."""
        with self._asking():
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))

    def nodes(self) -> list[NodeStatus]:
        """Return the registered nodes."""
        with self._asking():
            reply = self._client.ListNodes(ListNodesRequest())
        nodes = [NodeStatus(node.node_id, node.name, node.status) for node in reply.nodes_info]
        return sorted(nodes, key=lambda node: (node.name, node.node_id))

    def runs(self) -> list[RunStatus]:
        """Return the runs, the latest first."""
        with self._asking():
            reply = self._client.ListRuns(ListRunsRequest())
        runs = [
            RunStatus(
                run_id=run.run_id,
                status=run.status.status,
                outcome=run.status.sub_status,
                details=run.status.details,
                pending_at=run.pending_at,
                bytes_sent=run.bytes_sent,
                bytes_received=run.bytes_recv,
            )
            for run in reply.run_dict.values()
        ]
        return sorted(runs, key=lambda run: run.pending_at, reverse=True)

    def run_status(self, run_id: int) -> RunStatus:
        """Return one run."""
        for run in self.runs():
            if run.run_id == run_id:
                return run
        raise DeploymentError(f"no run {run_id} at {self.address}: 'fedsieve deploy status' lists them")

    def start(self, app: Path, changes: Mapping[str, ConfigValue]) -> int:
        """Submit the app in the folder ``app`` with these changes to its run config, and return the run's id."""
        bundle = build_fab_from_disk(app)
        fab = Fab("", bundle, {})
        with self._asking():
            reply = self._client.StartRun(
                StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(changes)))
            )
        return int(reply.run_id)

    def stop(self, run_id: int) -> None:
        """End a run; its checkpoint stays."""
        with self._asking():
            self._client.StopRun(StopRunRequest(run_id=run_id))

    def logs(self, run_id: int) -> Iterator[str]:
        """Yield what the ServerApp of a run has logged and logs, until the run is over."""
        with self._asking():
            for reply in self._client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=0.0)):
                yield reply.log_output

    def see_through(
        self,
        app: Path,
        changes: Mapping[str, ConfigValue],
        *,
        tell: Callable[[str], None] = lambda text: None,
    ) -> RunStatus:
        """Submit a run and watch it to its end; where its ServerApp is lost, submit it again from its checkpoint.

        A SuperLink that does not answer is waited for. What was a fault of the run itself, such as a bad config, is not
        tried again: it says so in its log.
        """
        again: dict[str, ConfigValue] = {}
        for _ in range(_MOST_ATTEMPTS):
            run_id = self._patiently(partial(self.start, app, {**changes, **again}))
            tell(f"run {run_id} submitted{' again: it goes on from its checkpoint' if again else ''}")
            status = self._watch(run_id)
            if status.outcome == "completed":
                return status
            if status.outcome == "stopped" or not _was_lost(status):
                raise DeploymentError(
                    f"run {run_id} {status.outcome}: {status.details or 'no details'}; "
                    f"'fedsieve deploy logs {run_id}' has more"
                )
            tell(f"run {run_id} lost its ServerApp: {status.details}")
            again = {"restart": True}
        raise DeploymentError(
            f"gave up after {_MOST_ATTEMPTS} attempts; 'fedsieve deploy run --resume' goes on where it was"
        )

    def answers(self) -> bool:
        """Whether it answers; whoever answers in its place under another CA is an error."""
        try:
            self.nodes()
        except LinkUnreachable:
            return False
        return True

    def wait_until_ready(self, seconds: float) -> None:
        """Return once the SuperLink answers."""
        self._patiently(self.nodes, seconds)

    def _watch(self, run_id: int) -> RunStatus:
        while not (status := self._patiently(lambda: self.run_status(run_id))).finished:
            time.sleep(_POLL_SECONDS)
        return status

    def _patiently(self, ask: Callable[[], Answer], seconds: float = _LINK_PATIENCE) -> Answer:
        """Return the answer of ``ask``; while nothing answers at all, try again."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return ask()
            except LinkUnreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPStatusError as error:
            problem = FlowerError.from_json(error.response.text)
            reason = f"{problem.message} {problem.public_details or ''}".strip() if problem else error.response.text
            raise DeploymentError(
                f"the SuperLink at {self.address} refuses: {error.response.status_code} {reason[:500]}"
            ) from error
        except httpx.TransportError as error:
            wrong_ca = "CERTIFICATE_VERIFY_FAILED" in str(error)
            hint = "its certificate is not of the given CA" if wrong_ca else "is it running there?"
            kind = DeploymentError if wrong_ca else LinkUnreachable
            raise kind(f"no SuperLink answers at {self.address}: {error}; {hint}") from error


class LinkUnreachable(DeploymentError):  # noqa: N818 - it is a state, not a fault
    """Nothing answers where a SuperLink should be; it may be on its way back."""


def _was_lost(status: RunStatus) -> bool:
    """Tell whether a run failed because its ServerApp vanished or was told to stop, rather than by an own error."""
    return status.outcome == "failed" and not status.details.startswith("ServerApp failed with exception")
