"""A site behind its daemon, as the shim sees it: bytes there and back, no torch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from client.channel import TOKEN_KEY, Access
from client.rpc import site_pb2 as messages
from client.rpc.site_pb2_grpc import SiteStub
from common.errors import DaemonStopped, ModelMissing, PlanRefused, SiteUnreachable, WireError

_CONNECT_SECONDS = 20.0
_ANSWER_SECONDS = 20.0
_RESTART_SECONDS = 60.0  # for a daemon that stops in the middle to come back


class RemoteSite:
    """Asks a daemon; looks like the Site itself.

    ``patience`` is how many seconds a training may take: after that nobody waits for its release any more.
    """

    def __init__(self, access: Access, patience: float | None = None) -> None:
        self._access = access
        self._deadline = None if patience is None else time.monotonic() + patience
        token = access.secret()
        self._metadata = () if token is None else ((TOKEN_KEY, token),)

    @property
    def declared_size(self) -> int:
        """The number of records that the site makes public."""
        with self._stub() as stub:
            reply = stub.Describe(messages.DescribeRequest(), metadata=self._metadata, timeout=_ANSWER_SECONDS)
            return int(reply.declared_size)

    def train(self, plan_bytes: bytes, model_bytes: bytes, signature: bytes) -> bytes:
        """Have the site carry out a plan and return the coded update; raises what the Site raises.

        A daemon that stops in the middle is asked again once it is back: the same round under the same charge.
        """
        request = messages.TrainRequest(plan=plan_bytes, model=model_bytes, signature=signature)
        try:
            return self._train(request, _CONNECT_SECONDS)
        except DaemonStopped:
            return self._train(request, _RESTART_SECONDS)

    def _train(self, request: messages.TrainRequest, connect_seconds: float) -> bytes:
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        with self._stub(connect_seconds) as stub:
            for reply in stub.Train(request, metadata=self._metadata, timeout=left):
                match reply.WhichOneof("event"):
                    case "update":
                        return bytes(reply.update)
                    case "refusal":
                        raise PlanRefused(reply.refusal.reason, for_good=reply.refusal.for_good)
                    case "damaged":
                        raise WireError(reply.damaged)
                    case "model_wanted":
                        raise ModelMissing("the site does not hold the model that this one is a difference from")
        raise SiteUnreachable(f"the site at {self._access.address} ended its answer without an update")

    def status(self) -> messages.StatusReply:
        """Return what the daemon is doing and what has been spent."""
        with self._stub() as stub:
            reply: messages.StatusReply = stub.Status(
                messages.StatusRequest(), metadata=self._metadata, timeout=_ANSWER_SECONDS
            )
            return reply

    @contextmanager
    def _stub(self, connect_seconds: float | None = None) -> Iterator[SiteStub]:
        connect_seconds = connect_seconds or _CONNECT_SECONDS
        try:
            with self._access.open_channel() as channel:
                grpc.channel_ready_future(channel).result(connect_seconds)
                yield SiteStub(channel)  # type: ignore[no-untyped-call]
        except grpc.FutureTimeoutError:
            raise SiteUnreachable(
                f"no site answers at {self._access.address} within {connect_seconds:g} s: is 'fedsieve site serve' "
                "running there, with the same keys?"
            ) from None
        except grpc.RpcError as error:
            # Once connected, UNAVAILABLE means that the connection broke or that the daemon is being stopped.
            kind = DaemonStopped if error.code() is grpc.StatusCode.UNAVAILABLE else SiteUnreachable
            raise kind(f"the site at {self._access.address} failed: {error.code().name}, {error.details()}") from error
