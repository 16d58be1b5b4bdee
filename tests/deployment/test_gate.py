"""The gate before a small server that writes down what reaches it: what is let through, how much, and how fast."""

import asyncio
import http.client
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from client.channel import MAX_MESSAGE_BYTES
from deployment import gate
from deployment.keys import ServerKeys
from deployment.processes import hold_port, port_of
from tests.deployment.servers import serving, trust_in

LIMIT = 1 << 20
PUSH = "/v1/fleet/push-object"


class Link:
    """Stands where a SuperLink would: answers everything, and writes down what came, and how long it was."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.headers: dict[str, str] = {}
        self.first_piece_was_read = threading.Event()
        routes = [
            Route("/v1/fleet/stream", self.stream, methods=["POST"]),
            Route("/{path:path}", self.answer, methods=["GET", "POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        self.asked.append((request.url.path, len(body)))
        self.headers = dict(request.headers)
        headers = {"content-type": "application/protobuf", "x-flwr-version": "1", "flwr-run": "2", "set-cookie": "x"}
        return Response(body, 201, headers)

    async def stream(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"first"
            in_time = await asyncio.to_thread(self.first_piece_was_read.wait, 5)
            yield b"second" if in_time else b"too late"

        return StreamingResponse(pieces())


@pytest.fixture(scope="module")
def served(keys: ServerKeys) -> Iterator[tuple[Link, httpx.Client]]:
    link = Link()
    with (
        serving(link.app, keys) as behind,
        serving(gate.build(behind, keys.ca), keys) as here,
        httpx.Client(base_url=f"https://{here}", verify=trust_in(keys)) as client,
    ):
        yield link, client


@pytest.fixture
def link(served: tuple[Link, httpx.Client]) -> Link:
    served[0].asked.clear()
    return served[0]


@pytest.fixture
def client(served: tuple[Link, httpx.Client], monkeypatch: pytest.MonkeyPatch) -> httpx.Client:
    monkeypatch.setattr(gate, "_MAX_BODY", LIMIT)
    return served[1]


@contextmanager
def by_hand(client: httpx.Client) -> Iterator[http.client.HTTPSConnection]:
    """Connect to where a client does, to say what httpx would tidy up."""
    address = httpx.URL(client.base_url)
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(address.host, address.port, context=trust, timeout=30)
    try:
        yield connection
    finally:
        connection.close()


def test_what_a_node_says_is_handed_on_and_the_answer_comes_back(link: Link, client: httpx.Client) -> None:
    body = bytes(range(256))
    reply = client.post(PUSH, content=body)
    assert (reply.status_code, reply.content) == (201, body)
    in_pieces = client.post(PUSH, content=iter([body[:100], body[100:200]]))
    assert in_pieces.content == body[:200]
    assert client.get("/health").status_code == 201
    assert link.asked == [(PUSH, 256), (PUSH, 200), ("/health", 0)]


def test_flowers_own_headers_and_those_of_the_body_are_handed_on_and_no_others(
    link: Link, client: httpx.Client
) -> None:
    kept = {"x-flwr-signature": "s", "flwr-run": "r", "content-type": "t", "accept": "a", "content-encoding": "e"}
    dropped = {"cookie": "c", "authorization": "b", "x-forwarded-for": "f", "content-language": "l"}
    reply = client.post(PUSH, content=b"body", headers={**kept, **dropped})
    assert {name: link.headers.get(name) for name in kept} == kept
    assert link.headers["content-length"] == "4"
    assert not dropped.keys() & link.headers.keys()
    assert {name: reply.headers[name] for name in ("content-type", "x-flwr-version", "flwr-run")} == {
        "content-type": "application/protobuf",
        "x-flwr-version": "1",
        "flwr-run": "2",
    }
    assert "set-cookie" not in reply.headers
    client.post(PUSH, content=b"body")
    assert "cookie" not in link.headers  # which the SuperLink has set for whoever asked before


def test_an_answer_is_handed_on_as_it_comes(link: Link, client: httpx.Client) -> None:
    with client.stream("POST", "/v1/fleet/stream", content=b"x") as reply:
        pieces = reply.iter_raw()
        assert next(pieces) == b"first"
        link.first_piece_was_read.set()
        assert b"".join(pieces) == b"second"


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
    with by_hand(client) as connection:
        connection.request("POST", path, body=b"x")
        assert connection.getresponse().status == 404
    assert not link.asked


def test_what_is_let_through_is_asked_in_one_way_alone(link: Link, client: httpx.Client) -> None:
    assert client.get(PUSH).status_code == 405
    assert client.post("/health", content=b"x").status_code == 405
    assert not link.asked


def whole(size: int) -> bytes:
    return bytes(size)


def in_pieces(size: int) -> Iterator[bytes]:
    yield bytes(size - 1)
    yield bytes(1)


@pytest.mark.parametrize("body", [whole, in_pieces])
def test_a_body_is_as_long_as_is_allowed_and_no_longer(
    link: Link, client: httpx.Client, body: Callable[[int], bytes | Iterator[bytes]]
) -> None:
    refused = client.post(PUSH, content=body(LIMIT + 1))
    assert (refused.status_code, refused.text) == (413, f"at most {LIMIT} bytes")
    assert not link.asked  # whole, that is
    assert client.post(PUSH, content=body(LIMIT)).status_code == 201
    assert link.asked == [(PUSH, LIMIT)]


def test_a_body_that_will_be_too_long_is_not_waited_for(client: httpx.Client) -> None:
    with by_hand(client) as connection:
        connection.putrequest("POST", PUSH)
        connection.putheader("content-length", str(LIMIT + 1))
        connection.endheaders()
        assert connection.getresponse().status == 413


def test_whoever_sends_nothing_more_is_not_waited_for(
    link: Link, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_PATIENCE_SECONDS", 0.2)
    with by_hand(client) as connection:
        connection.putrequest("POST", PUSH)
        connection.putheader("content-length", "10")
        connection.endheaders(b"5 are")
        reply = connection.getresponse()
        assert (reply.status, reply.read()) == (408, b"nothing came for 0.2 s")
    assert not link.asked


def test_limits() -> None:
    assert gate._MAX_BODY == MAX_MESSAGE_BYTES  # a model that a daemon takes gets to it
    assert gate._PATIENCE_SECONDS == 60


def test_a_superlink_that_is_away_is_to_be_asked_again(keys: ServerKeys) -> None:
    with hold_port() as nobody, serving(gate.build(f"localhost:{port_of(nobody)}", keys.ca), keys) as here:
        reply = httpx.post(f"https://{here}/v1/fleet/get-run", content=b"x", verify=trust_in(keys))
        assert (reply.status_code, reply.text) == (503, "the SuperLink was not asked: ConnectError")


def test_a_superlink_under_another_certificate_is_none(link: Link, keys: ServerKeys, tmp_path: Path) -> None:
    others = ServerKeys.create(tmp_path / "others", ("localhost", "127.0.0.1"), 1)
    with serving(link.app, others) as behind, serving(gate.build(behind, keys.ca), keys) as here:
        reply = httpx.post(f"https://{here}/v1/fleet/get-run", content=b"x", verify=trust_in(keys))
        assert reply.status_code == 503
    assert not link.asked


def test_a_node_that_goes_away_in_the_middle_is_no_error_of_the_gate(link: Link, keys: ServerKeys) -> None:
    received = iter([{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask(app: Starlette) -> None:
        async with app.router.lifespan_context(app):
            await app({"type": "http", "method": "POST", "path": PUSH, "headers": [], "app": app}, receive, send)

    with serving(link.app, keys) as behind:
        asyncio.run(ask(gate.build(behind, keys.ca)))
    assert sent[0]["status"] == 503 and not link.asked


@pytest.mark.parametrize(("listen", "host"), [("0.0.0.0:8443", "0.0.0.0"), ("[::]:8443", "::")])
def test_the_command_serves_under_the_servers_certificate(
    keys: ServerKeys, monkeypatch: pytest.MonkeyPatch, listen: str, host: str
) -> None:
    served: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: served.update(app=app, **options))
    monkeypatch.setattr(gate, "build", lambda superlink, ca: (superlink, ca))
    monkeypatch.setattr(sys, "argv", ["gate", "--listen", listen, "--superlink", "link:8000", "--keys", str(keys.link)])
    gate.main()
    assert served == {
        "app": ("link:8000", keys.link / "ca.crt"),
        "host": host,
        "port": 8443,
        "ssl_certfile": str(keys.link / "server.crt"),
        "ssl_keyfile": str(keys.link / "server.key"),
        "ws": "none",
        "log_level": "warning",
    }


def test_the_command_needs_all_its_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--listen": "0.0.0.0:1", "--superlink": "link:8000", "--keys": "keys"}
    for missing in given:
        others = [word for option, value in given.items() if option != missing for word in (option, value)]
        monkeypatch.setattr(sys, "argv", ["gate", *others])
        with pytest.raises(SystemExit, match="2"):
            gate.main()
        assert f"required: {missing}\n" in capsys.readouterr().err
