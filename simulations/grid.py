"""A Flower Grid inside this process: no network, no state store, no polling."""

import itertools
import traceback
from collections.abc import Iterable, Mapping
from typing import NoReturn

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from common.config import ConfigValue

_RUN_ID = 1
_SERVER_NODE_ID = 1
_FIRST_NODE_ID = 1000


def site_of(node_id: int) -> int:
    """Return the site that a simulated node stands for."""
    return node_id - _FIRST_NODE_ID


def run_client_app(app: ClientApp, message: Message, sites: int, run_config: Mapping[str, ConfigValue]) -> Message:
    """Let the ClientApp answer a message as the node that it is addressed to; a site that raises answers an Error."""
    node_id = message.metadata.dst_node_id
    context = Context(
        run_id=_RUN_ID,
        node_id=node_id,
        node_config={"partition-id": site_of(node_id), "num-partitions": sites},
        state=RecordDict(),
        run_config=dict(run_config),
    )
    try:
        return app(message, context)
    except Exception as error:  # whatever a site's code raises is that site's failure, not the run's
        reason = "".join(traceback.format_exception_only(error)).strip()
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


class LocalGrid(Grid):
    """What grids of simulated nodes share: nodes are numbered like their sites, messages get ids here."""

    def __init__(self, sites: int) -> None:
        self.sites = sites
        self._message_ids = itertools.count(1)
        self._replies: dict[str, Message] = {}
        # Flower stamps every message with the identity of the task that makes it.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = _RUN_ID, _SERVER_NODE_ID, _RUN_ID

    def set_run(self, run: Run) -> None:
        """Ignore Flower's run: a local grid serves one run of its own."""

    @property
    def run(self) -> NoReturn:
        """Flower's record of a run, which a local grid does not have."""
        raise NotImplementedError("a simulation without SuperLink has no Run record")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message, as Flower's older interface does."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> list[int]:
        """Return one node per site."""
        return [_FIRST_NODE_ID + site for site in range(self.sites)]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Give every message an id and set the work going."""
        pushed = list(messages)
        for message in pushed:
            # As long as the ids that a SuperLink gives, so that a message costs what it costs there.
            message.metadata.__dict__["_message_id"] = f"{next(self._message_ids):064x}"
        self._launch(pushed)
        return [message.metadata.message_id for message in pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have come in so far."""
        self._collect(timeout=0)
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push messages and wait for their replies, at most ``timeout`` seconds."""
        message_ids = self.push_messages(messages)
        self._collect(timeout)
        replies = self.pull_messages(message_ids)
        self._abandon()
        return replies

    def close(self) -> None:
        """Let go of whatever answers the messages."""

    def _launch(self, messages: list[Message]) -> None:
        raise NotImplementedError

    def _collect(self, timeout: float | None) -> None:
        """Wait until all work is done or ``timeout`` has passed, and file the replies under what they answer."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Give up what has not been answered in time."""


class InProcessGrid(LocalGrid):
    """Every site in this very process, one after the other: for tests and for a debugger."""

    def __init__(self, app: ClientApp, sites: int, run_config: Mapping[str, ConfigValue]) -> None:
        super().__init__(sites)
        self._app = app
        self._run_config = dict(run_config)

    def _launch(self, messages: list[Message]) -> None:
        for message in messages:
            reply = run_client_app(self._app, message, self.sites, self._run_config)
            self._replies[message.metadata.message_id] = reply

    def _collect(self, timeout: float | None) -> None:
        """Have nothing to wait for: messages are answered as they are sent."""
