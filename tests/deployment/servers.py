"""Small servers for tests: any app under a deployment's certificate, and a SuperLink that says what a test makes it."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from flwr.proto.control_pb2 import (
    ListNodesResponse,
    ListRunsResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    StartRunRequest,
    StartRunResponse,
    StopRunRequest,
    StopRunResponse,
    StreamLogsRequest,
    StreamLogsResponse,
    UnregisterNodeRequest,
    UnregisterNodeResponse,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.run_pb2 import Run, RunStatus
from flwr.supercore.protobuf.framing import frame_message
from google.protobuf.message import Message
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployment.keys import ServerKeys
from deployment.processes import hold_port, port_of


@contextmanager
def serving(app: Starlette, keys: ServerKeys) -> Iterator[str]:
    """Serve ``app`` under the server's certificate until the end of the block; gives its address."""
    files = {"ssl_certfile": str(keys.link / "server.crt"), "ssl_keyfile": str(keys.link / "server.key")}
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", **files))
    with hold_port() as held:
        thread = threading.Thread(target=server.run, args=([held],))
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"localhost:{port_of(held)}"
        finally:
            server.should_exit = server.force_exit = True  # clients that keep their connection are not waited for
            thread.join()


def trust_in(keys: ServerKeys) -> ssl.SSLContext:
    """Return what a client trusts that knows the server's CA."""
    return ssl.create_default_context(cafile=str(keys.ca))


def a_run(run_id: int, state: str = "running", outcome: str = "", details: str = "", **more: Any) -> Run:
    """Return a run as a SuperLink lists it."""
    status = RunStatus(status=state, sub_status=outcome, details=details)
    return Run(run_id=run_id, status=status, **{"pending_at": "2026-01-01T00:00:00+00:00", **more})


class FakeLink:
    """Answers the Control API from what a test puts in, and writes down what it was asked.

    Runs that are started take their states, one at every look, from ``fates``: the first run from the first of them.
    """

    def __init__(self) -> None:
        self.address = ""
        self.app = Starlette(routes=[Route("/v1/control/{call}", self._answer, methods=["POST"])])
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.nodes: list[NodeInfo] = []
        self.runs: dict[int, Run] = {}
        self.log: list[str] = []
        self.fates: list[list[tuple[str, str, str]]] = []
        self.refusal: Response | None = None
        self.asked: list[Message] = []

    async def _answer(self, request: Request) -> Response:
        if self.refusal is not None:
            return self.refusal
        calls: dict[str, tuple[Callable[[], Message] | None, Callable[[Any], bytes]]] = {
            "list-nodes": (None, lambda _: ListNodesResponse(nodes_info=self.nodes).SerializeToString()),
            "list-runs": (None, lambda _: self._list().SerializeToString()),
            "start-run": (StartRunRequest, lambda _: StartRunResponse(run_id=self._start()).SerializeToString()),
            "stop-run": (StopRunRequest, lambda _: StopRunResponse(success=True).SerializeToString()),
            "register-node": (RegisterNodeRequest, lambda _: RegisterNodeResponse(node_id=77).SerializeToString()),
            "unregister-node": (UnregisterNodeRequest, lambda _: UnregisterNodeResponse().SerializeToString()),
            "stream-logs": (
                StreamLogsRequest,
                lambda _: b"".join(frame_message(StreamLogsResponse(log_output=text)) for text in self.log),
            ),
        }
        kind, answer = calls[request.path_params["call"]]
        asked = None
        if kind is not None:
            asked = kind()
            asked.ParseFromString(await request.body())
            self.asked.append(asked)
        return Response(answer(asked))

    def _start(self) -> int:
        run_id = len([one for one in self.asked if isinstance(one, StartRunRequest)])
        self.runs[run_id] = a_run(run_id)
        return run_id

    def _list(self) -> ListRunsResponse:
        for run_id, run in self.runs.items():
            if run_id <= len(self.fates) and self.fates[run_id - 1]:
                state, outcome, details = self.fates[run_id - 1].pop(0)
                run.status.CopyFrom(RunStatus(status=state, sub_status=outcome, details=details))
        return ListRunsResponse(run_dict=self.runs)
