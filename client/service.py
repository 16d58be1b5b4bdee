"""The site's daemon: the Site behind gRPC, started by the site's operator from the operator's own installation.

It owns data, ledger, noise and training, and keeps torch and the model warm. One training runs at a time. Plans are
data: nothing that a server names is imported, except the models that the policy allows.
"""

import hmac
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from importlib.metadata import version
from queue import SimpleQueue
from typing import Any

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from client.channel import DAEMON_OPTIONS, TOKEN_KEY, Access
from client.rpc import site_pb2 as messages
from client.rpc.site_pb2_grpc import SiteServicer, add_SiteServicer_to_server
from client.site import Guard, Site, TrainingStopped
from common.accounting import epsilon_of
from common.errors import FedsieveError, ModelMissing, NoRelease, PlanRefused, WireError
from common.plan import RoundPlan

log = logging.getLogger("fedsieve.site")

_SERVICE = "fedsieve.site.v1.Site"
_THREADS = 8


class SiteService(SiteServicer):
    """Answers requests with the site's own answers."""

    def __init__(self, site: Site, guard: Guard) -> None:
        self._site = site
        self._guard = guard
        self._training = threading.Lock()
        self._stopping = threading.Event()
        self._now = messages.StatusReply(version=version("fedsieve"))

    def stop(self) -> None:
        """End a training at its next step; its charge stays, and the round can be asked for again."""
        self._stopping.set()

    def Describe(self, request: messages.DescribeRequest, context: grpc.ServicerContext) -> messages.Description:  # noqa: N802
        """Say what the site says in public."""
        return messages.Description(declared_size=self._site.declared_size)

    def Train(  # noqa: N802
        self, request: messages.TrainRequest, context: grpc.ServicerContext
    ) -> Iterator[messages.TrainReply]:
        """Carry out a plan, or say why not."""
        events: SimpleQueue[messages.TrainReply | BaseException] = SimpleQueue()
        worker = threading.Thread(target=self._train, args=(request, events.put, context.is_active), daemon=True)
        worker.start()
        while True:
            event = events.get()
            if isinstance(event, BaseException):
                code = grpc.StatusCode.UNAVAILABLE if isinstance(event, TrainingStopped) else grpc.StatusCode.INTERNAL
                context.abort(code, str(event))
                return  # abort has raised; type checkers do not know
            yield event
            if event.WhichOneof("event") != "progress":
                return

    def _train(
        self,
        request: messages.TrainRequest,
        tell: Callable[[messages.TrainReply | BaseException], None],
        still_asked: Callable[[], bool],
    ) -> None:
        with self._training:  # one at a time; whoever comes second waits
            try:
                if self._stopping.is_set() or not still_asked():  # nobody would see what is charged now
                    raise TrainingStopped("the site is being stopped, or the asker is gone")
                tell(self._answer(request, tell))
            except TrainingStopped as stopping:
                log.warning("%s", stopping)
                tell(stopping)
            except NoRelease as failed:  # the site has logged why
                tell(failed)
            except Exception as error:  # before the charge: no record had a part in it
                log.exception("training failed")
                tell(error if isinstance(error, FedsieveError) else RuntimeError("training failed at the site"))
            finally:
                self._now.training = False

    def _answer(
        self, request: messages.TrainRequest, tell: Callable[[messages.TrainReply], None]
    ) -> messages.TrainReply:
        try:
            plan = RoundPlan.from_bytes(request.plan)
            self._now.training, self._now.run, self._now.round = True, plan.run, plan.round

            def progress(steps_done: int) -> None:
                if self._stopping.is_set():
                    raise TrainingStopped("the site is being stopped in the middle of a round; its charge stays")
                current = messages.Progress(steps_done=steps_done, steps=plan.steps)
                self._now.progress.CopyFrom(current)
                tell(messages.TrainReply(progress=current))

            update = self._site.train(request.plan, request.model, request.signature, progress)
            log.info("run %s, round %d: released %d bytes", plan.run, plan.round, len(update))
            return messages.TrainReply(update=update)
        except PlanRefused as refused:
            log.warning("refused: %s", refused)
            return messages.TrainReply(refusal=messages.Refusal(reason=str(refused), for_good=refused.for_good))
        except WireError as damaged:
            log.warning("damaged request: %s", damaged)
            return messages.TrainReply(damaged=str(damaged))
        except ModelMissing:
            return messages.TrainReply(model_wanted=True)

    def Evaluate(self, request: messages.EvaluateRequest, context: grpc.ServicerContext) -> messages.EvaluateReply:  # noqa: N802
        """Try a model on the site's own records and log the result here: it has no noise, so it may not leave."""
        try:
            with self._training:
                score = self._site.evaluate(request.plan, request.model, request.signature)
        except FedsieveError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Exception:  # gRPC would tell the asker its words, and these may be about a record
            log.exception("evaluation failed")
            context.abort(grpc.StatusCode.INTERNAL, "evaluation failed at the site")
        accuracy = "" if score.accuracy is None else f"accuracy {score.accuracy:.4f}, "
        log.info("model %s: %sloss %.4f on this site's records", score.digest, accuracy, score.loss)
        return messages.EvaluateReply()

    def Status(self, request: messages.StatusRequest, context: grpc.ServicerContext) -> messages.StatusReply:  # noqa: N802
        """Tell the operator what is going on and what has been spent."""
        policy, ledger = self._guard.policy, self._guard.ledger
        reply = messages.StatusReply()
        reply.CopyFrom(self._now)
        reply.entries = ledger.length
        reply.epsilon_spent = epsilon_of(ledger.history, policy.delta, policy.accountant)
        reply.epsilon_budget, reply.delta = policy.epsilon, policy.delta
        return reply


class _TokenCheck(grpc.ServerInterceptor):  # type: ignore[misc]
    """Lets nobody in who does not show the token; health checks need none."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

        def refuse(request: Any, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the site's token is missing or wrong")

        self._refused = grpc.unary_unary_rpc_method_handler(refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Check the token that came with a call."""
        shown = dict(details.invocation_metadata).get(TOKEN_KEY, "")
        if details.method.startswith("/grpc.health.") or hmac.compare_digest(_bytes(shown), self._token):
            return continuation(details)
        return self._refused


def _bytes(shown: str | bytes) -> bytes:
    return shown if isinstance(shown, bytes) else shown.encode()


class Daemon:
    """A serving site."""

    def __init__(self, site: Site, guard: Guard, access: Access, threads: int = 0) -> None:
        """Listen at ``access``; ``threads`` of torch, 0 for all cores."""
        if threads:
            torch.set_num_threads(threads)
        token = access.secret()
        self._service = SiteService(site, guard)
        self._health = health.HealthServicer()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(_THREADS),
            interceptors=() if token is None else (_TokenCheck(token),),
            options=DAEMON_OPTIONS,
            maximum_concurrent_rpcs=_THREADS,
        )
        add_SiteServicer_to_server(self._service, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        access.listen(self._server)

    def start(self) -> None:
        """Begin to serve."""
        self._server.start()
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._health.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)

    def stop(self, grace_seconds: float = 30.0) -> None:
        """Take no more requests, end a running training at its next step, and return when all is quiet."""
        self._health.enter_graceful_shutdown()
        self._service.stop()
        self._server.stop(grace_seconds).wait()
