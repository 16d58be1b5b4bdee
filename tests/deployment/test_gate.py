"""The gate before a small server that writes down what reaches it: what is let through, how much, and how fast."""

import http.client
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployment import gate
from deployment.keys import ServerKeys
from deployment.processes import free_port

LIMIT = 1 << 20


@contextmanager
def serving(app: Starlette, keys: ServerKeys, port: int) -> Iterator[str]:
    """Serve ``app`` under the server's certificate until the end of the block; gives its address."""
    files = {"ssl_certfile": str(keys.link / "server.crt"), "ssl_keyfile": str(keys.link / "server.key")}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", ws="none", **files))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    try:
        yield f"localhost:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Link:
    """Stands where a SuperLink would: answers everything, and writes down the path and the length of what came."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        self.asked.append((request.url.path, len(body)))
        return Response(
            body, headers={"content-type": "application/protobuf", "x-flwr-version": "1", "server-secret": "x"}
        )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ServerKeys:
    return ServerKeys.create(tmp_path_factory.mktemp("gate") / "server", ("localhost", "127.0.0.1"), 1)


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def client(link: Link, keys: ServerKeys, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setattr(gate, "_MAX_BODY", LIMIT)
    trust = ssl.create_default_context(cafile=str(keys.ca))
    with (
        serving(link.app, keys, free_port()) as behind,
        serving(gate.build(behind, keys.ca), keys, free_port()) as here,
        httpx.Client(base_url=f"https://{here}", verify=trust) as client,
    ):
        yield client


def test_what_a_node_says_is_handed_on_and_the_answer_comes_back(link: Link, client: httpx.Client) -> None:
    body = bytes(range(256)) * (LIMIT // 256)  # exactly what is allowed
    reply = client.post("/v1/fleet/push-object", content=body, headers={"x-flwr-signature": "s", "cookie": "c"})
    assert (reply.status_code, reply.content, reply.headers["x-flwr-version"]) == (200, body, "1")
    assert "server-secret" not in reply.headers
    in_pieces = client.post("/v1/fleet/push-object", content=iter([body[:1000], body[1000:5000]]))
    assert in_pieces.content == body[:5000]
    assert client.get("/health").status_code == 200
    assert link.asked == [("/v1/fleet/push-object", LIMIT), ("/v1/fleet/push-object", 5000), ("/health", 0)]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/pull-task",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/..%2fcontrol%2fstart-run",
        "/v1/fleet/..%252fcontrol%252fstart-run",
        "/v1/fleet/..",
        "/v1/fleet/%2e%2e",
        "/v1/fleet/pull-messages%3f/../../control",
        "//v1/control/start-run",
        "/docs",
    ],
)
def test_nothing_else_is_reached_however_it_is_written(link: Link, client: httpx.Client, path: str) -> None:
    address = httpx.URL(client.base_url)
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE  # by hand: httpx would tidy the path up
    connection = http.client.HTTPSConnection(address.host, address.port, context=trust)
    connection.request("POST", path, body=b"x")
    assert connection.getresponse().status in (404, 405)
    connection.close()
    assert not link.asked


def test_too_much_is_refused_whether_it_is_announced_or_not(link: Link, client: httpx.Client) -> None:
    assert client.post("/v1/fleet/push-object", content=bytes(LIMIT + 1)).status_code == 413
    in_pieces = client.post("/v1/fleet/push-object", content=(bytes(LIMIT // 4) for _ in range(5)))
    assert in_pieces.status_code == 413
    assert not link.asked  # whole, that is


def test_whoever_sends_nothing_more_is_not_waited_for(
    link: Link, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_CHUNK_SECONDS", 0.5)

    def slowly() -> Iterator[bytes]:
        yield b"the beginning"
        time.sleep(2.0)
        yield b"the end"

    assert client.post("/v1/fleet/push-object", content=slowly()).status_code == 408
    assert not link.asked


def test_a_superlink_that_is_away_is_to_be_asked_again(keys: ServerKeys) -> None:
    nobody = f"localhost:{free_port()}"
    trust = ssl.create_default_context(cafile=str(keys.ca))
    with serving(gate.build(nobody, keys.ca), keys, free_port()) as here:
        assert httpx.post(f"https://{here}/v1/fleet/get-run", content=b"x", verify=trust).status_code == 503


def test_a_superlink_under_another_certificate_is_none(link: Link, keys: ServerKeys, tmp_path: Path) -> None:
    others = ServerKeys.create(tmp_path / "others", ("localhost", "127.0.0.1"), 1)
    trust = ssl.create_default_context(cafile=str(keys.ca))
    with (
        serving(link.app, others, free_port()) as behind,
        serving(gate.build(behind, keys.ca), keys, free_port()) as here,
    ):
        assert httpx.post(f"https://{here}/v1/fleet/get-run", content=b"x", verify=trust).status_code == 503
    assert not link.asked
