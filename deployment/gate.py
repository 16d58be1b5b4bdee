"""The gate: what sites reach of a SuperLink, ``python gate.py --listen HOST:PORT --superlink HOST:PORT --keys FOLDER``.

A SuperLink answers sites (Fleet API), its operator (Control API: start runs, register nodes) and ServerApps (Runtime
API) at one port, and asks its operator for no proof. The gate hands on the first alone, under the same certificate:
whoever is given its address can do what an authenticated SuperNode can, and nothing else.

Stands alone: imports nothing of Fedsieve, so that its image needs this file and Flower, and no more.
"""

import argparse
import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_MAX_BODY = 1 << 28  # 256 MiB, as between shim and daemon
_PATIENCE_SECONDS = 60.0  # for the next piece of a request or of its answer
_KEPT_HEADERS = ("content-type", "content-length", "accept", "content-encoding")


def build(superlink: str, ca: Path) -> Starlette:
    """Return the gate before the SuperLink at ``superlink``."""
    trust = ssl.create_default_context(cafile=str(ca))

    @asynccontextmanager
    async def lifespan(gate: Starlette) -> AsyncIterator[None]:
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))  # sites share this client, and nothing else
        async with httpx.AsyncClient(
            base_url=f"https://{superlink}", verify=trust, timeout=_PATIENCE_SECONDS, cookies=no_cookies
        ) as client:
            gate.state.client = client
            yield

    async def hand_on(request: Request) -> Response:
        headers = {n: v for n, v in request.headers.items() if n in _KEPT_HEADERS or n.startswith(("flwr-", "x-flwr-"))}
        body = _pieces(request) if request.method == "POST" else None
        client: httpx.AsyncClient = request.app.state.client
        try:
            asked = client.build_request(request.method, _path(request), content=body, headers=headers)
            reply = await client.send(asked, stream=True)
        except (httpx.TransportError, ClientDisconnect) as error:  # nodes try again after a 503
            return Response(f"the SuperLink was not asked: {type(error).__name__}", status_code=503)
        kept = {n: v for n, v in reply.headers.items() if n == "content-type" or n.startswith(("flwr-", "x-flwr-"))}
        return StreamingResponse(reply.aiter_bytes(), reply.status_code, kept, background=BackgroundTask(reply.aclose))

    routes = [Route("/v1/fleet/{call}", hand_on, methods=["POST"]), Route("/health", hand_on, methods=["GET"])]
    return Starlette(routes=routes, lifespan=lifespan)


def _path(request: Request) -> str:
    """Return the path to ask the SuperLink for: what the routes let through, and no name that could mean another."""
    call = request.path_params.get("call")
    if call is None:
        return "/health"
    if not re.fullmatch("[a-z-]+", call):
        raise HTTPException(404)
    return f"/v1/fleet/{call}"


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield a request's body as it comes: whoever sends much, or slowly, fills nobody's memory here."""
    if int(request.headers.get("content-length", "0")) > _MAX_BODY:
        raise HTTPException(413, f"at most {_MAX_BODY} bytes")
    size, pieces = 0, aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise HTTPException(408, f"nothing came for {_PATIENCE_SECONDS:g} s") from None
        size += len(piece)
        if size > _MAX_BODY:
            raise HTTPException(413, f"at most {_MAX_BODY} bytes")
        yield piece


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(description="Let sites reach a SuperLink's Fleet API, and nothing else of it.")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where sites reach the gate")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT", help="where the SuperLink listens")
    parser.add_argument("--keys", required=True, type=Path, help="folder with ca.crt, server.crt and server.key")
    options = parser.parse_args()
    host, _, port = options.listen.rpartition(":")
    uvicorn.run(
        build(options.superlink, options.keys / "ca.crt"),
        host=host.strip("[]"),
        port=int(port),
        ssl_certfile=str(options.keys / "server.crt"),
        ssl_keyfile=str(options.keys / "server.key"),
        ws="none",
        log_level="warning",
    )


if __name__ == "__main__":
    main()
