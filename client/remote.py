"""A site behind its daemon, as the shim sees it: bytes there and back, no torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from client.channel import TOKEN_KEY, Access
from client.rpc import site_pb2 as messages
from client.rpc.site_pb2_grpc import SiteStub
from common.errors import ModelMissing, PlanRefused, SiteUnreachable, WireError

_CONNECT_SECONDS = 20.0


class RemoteSite:
    """Asks a daemon; looks like the Site itself."""

    def __init__(self, access: Access) -> None:
        self._access = access
        token = access.secret()
        self._metadata = () if token is None else ((TOKEN_KEY, token),)

    @property
    def declared_size(self) -> int:
        """The number of records that the site makes public."""
        with self._stub() as stub:
            reply = stub.Describe(messages.DescribeRequest(), metadata=self._metadata, timeout=_CONNECT_SECONDS)
            return int(reply.declared_size)

    def train(self, plan_bytes: bytes, model_bytes: bytes, signature: bytes) -> bytes:
        """Have the site carry out a plan and return the coded update; raises what the Site raises."""
        request = messages.TrainRequest(plan=plan_bytes, model=model_bytes, signature=signature)
        with self._stub() as stub:
            for reply in stub.Train(request, metadata=self._metadata):
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
                messages.StatusRequest(), metadata=self._metadata, timeout=_CONNECT_SECONDS
            )
            return reply

    @contextmanager
    def _stub(self) -> Iterator[SiteStub]:
        try:
            with self._access.open_channel() as channel:
                grpc.channel_ready_future(channel).result(_CONNECT_SECONDS)
                yield SiteStub(channel)  # type: ignore[no-untyped-call]
        except grpc.FutureTimeoutError:
            raise SiteUnreachable(
                f"no site answers at {self._access.address} within {_CONNECT_SECONDS:g} s: is 'fedsieve site serve' "
                "running there, with the same keys?"
            ) from None
        except grpc.RpcError as error:
            raise SiteUnreachable(
                f"the site at {self._access.address} failed: {error.code().name}, {error.details()}"
            ) from error
