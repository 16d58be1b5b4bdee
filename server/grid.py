"""Flower's grid of a deployment, made prompter: replies are fetched as they come, and an error says whose it is."""

import time
from collections.abc import Iterable
from typing import NoReturn

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds between two looks for replies; Flower's own grid takes 3
_AWAY = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


def is_away(reply: Message) -> bool:
    """Tell whether ``reply`` is the SuperLink's word that a node is gone, rather than the node's own."""
    return reply.has_error() and reply.error.code in _AWAY


class PromptGrid(Grid):
    """Another grid's messages, with replies fetched within a second.

    Where a node is gone the SuperLink answers in its place, in its own name: such a reply is put under the node that
    was asked, so that whoever asked can ask again.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, run: Run) -> None:
        """Hand on Flower's run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """Flower's run."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> NoReturn:
        """Refuse: messages are made with ``Message`` alone."""
        raise NotImplementedError("make a Message instead")

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are there."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have come in so far."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the replies that come within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        sent = list(messages)
        asked = {
            message_id: message.metadata.dst_node_id
            for message_id, message in zip(self.push_messages(sent), sent, strict=True)
            if message_id  # None where the SuperLink would not take it: nobody will reply
        }
        replies: list[Message] = []
        pause = _FIRST_PAUSE
        while asked and (deadline is None or time.monotonic() < deadline):
            for reply in self.pull_messages(set(asked)):
                node_id = asked.pop(reply.metadata.reply_to_message_id, None)
                if node_id is None:
                    continue
                if is_away(reply):
                    reply.metadata.__dict__["_src_node_id"] = node_id
                replies.append(reply)
            if asked:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        return replies
