"""Flower ClientApp: a thin shim that hands the plan to the site and returns its release.

It imports no torch: in a deployment Flower starts a process for every message.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from common.errors import FederationError, ModelMissing, PlanRefused, WireError
from common.records import Introduction, ModelWanted, Refusal, Release, Request


class OpenSite(Protocol):
    """What the shim needs of a site, wherever it lives."""

    @property
    def declared_size(self) -> int:
        """The number of records that the site makes public."""
        ...

    def train(self, plan_bytes: bytes, model_bytes: bytes, signature: bytes) -> bytes:
        """Carry out a plan and return the coded update."""
        ...


app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Tell the server which site this is, and the size that it declares."""
    site = _open_site(message, context)
    introduction = Introduction(_site_number(context), site.declared_size, simulated="site" not in context.node_config)
    return Message(introduction.to_content(), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Have the site carry out the plan; a refusal, or a wish for the whole model, is an answer and not a failure."""
    answer: Release | Refusal | ModelWanted
    try:
        request = Request.from_content(message.content)
        answer = Release(_open_site(message, context).train(request.plan, request.model, request.signature))
    except ModelMissing:
        answer = ModelWanted()
    except PlanRefused as refused:
        answer = Refusal(str(refused), refused.for_good)
    except WireError as damaged:
        answer = Refusal(str(damaged))
    return Message(answer.to_content(), reply_to=message)


def _site_number(context: Context) -> int:
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or number < 0:
        raise FederationError(f"expected 'partition-id' >= 0 in the node config, got {number!r}")
    return number


def _open_site(message: Message, context: Context) -> OpenSite:
    """Return the daemon that the node config names, or a site of this very process in a simulation."""
    if "site" in context.node_config:
        from client.channel import Access  # grpc: only where there is a daemon to talk to
        from client.remote import RemoteSite

        access = Access.of_node(context.node_config)
        assert access is not None
        return RemoteSite(access, patience=message.metadata.created_at + message.metadata.ttl - time.time())
    return _site_opener()(context)


@lru_cache(maxsize=1)
def _site_opener() -> Callable[[Context], OpenSite]:
    found = sorted(entry_points(group="fedsieve.sites"), key=lambda entry: entry.name)
    if not found:
        raise FederationError("no site can be opened on this node: install fedsieve here (pip install -e .)")
    opener: Callable[[Context], OpenSite] = found[0].load()
    return opener
