"""``fedsieve watch``: the report of a run that goes on, served on this machine alone and brought up to date in place.

It reads the run log and nothing else, so that it does not matter who writes it: a simulation, Flower's engine or the
server of a deployment. The browser asks once a second whether anything is new; the page is made when the log has grown.
"""

import hashlib
import signal
import threading
from collections.abc import Sequence
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from common.errors import ConfigError, RunFolderError
from server.runfolder import RunFolder
from simulations.report.live_script import SCRIPT
from simulations.report.page import document, section
from simulations.report.run_page import report_page
from simulations.report.summary import AUDIT_NAME, RunSummary, load_run

HOST = "127.0.0.1"
_OWN_NAMES = {HOST, "localhost"}  # under another name it would be a page elsewhere that asks (DNS rebinding)
_IDLE_SECONDS = 30.0  # of a connection that asks nothing, after which its thread ends


class LivePage:
    """The page of the runs in ``folders`` as it is now; made anew only when their logs have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if folder.exists() and not folder.is_dir():
                raise RunFolderError(f"{folder} is a file: expected the folder of a run, such as runs/<name>")
        self._folders = list(folders)
        self._lock = threading.Lock()
        self._seen: object = None
        self._page = b""
        self._tag = ""

    def current(self) -> tuple[str, bytes]:
        """Return the entity tag and the page."""
        with self._lock:
            seen = [_state(path) for folder in self._folders for path in (RunFolder(folder).log, folder / AUDIT_NAME)]
            if seen != self._seen:
                self._page = self._make().encode("utf-8", errors="xmlcharrefreplace")
                self._tag = f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'
                self._seen = seen
            return self._tag, self._page

    def _make(self) -> str:
        waiting = [folder for folder in self._folders if not _has_begun(folder)]
        if waiting:
            return _waiting_page(waiting)
        try:
            runs = [load_run(folder) for folder in self._folders]
            changed = max(RunFolder(folder).log.stat().st_mtime for folder in self._folders)
        except (RunFolderError, OSError) as error:  # OSError: a folder that was removed a moment ago
            return _damaged_page(str(error))
        return report_page(runs, above=_status(_progress(runs), _state_of(runs), changed), script=SCRIPT)


def serve(folders: Sequence[Path], port: int) -> int:
    """Serve the live page until Ctrl-C and return the exit code."""
    with live_server(folders, port) as server:
        waiting = [str(folder) for folder in folders if not _has_begun(folder)]
        for folder in waiting:
            print(f"{folder} has no run yet: the page waits for it")
        print(f"watch {', '.join(map(str, folders))} at http://{HOST}:{server.server_port}/ (Ctrl-C ends)", flush=True)
        # Also where a shell has put us into the background, and for whoever stops us by SIGTERM.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            print("\nstopped watching; the run itself goes on")
    return 0


def live_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Return a server of the live page that is bound to ``port`` of this machine; 0 takes any free one."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"expected a port from 0 (any free one) to 65535, got {port} (--port)")
    page = LivePage(folders)

    class Handler(_Handler):
        live_page = page

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {HOST}:{port} ({error.strerror}): choose another --port, or --port 0 for any free one"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    """Answers GET / with the page, or with 304 where the browser has it already."""

    live_page: LivePage
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer; the name is http.server's."""
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name not in _OWN_NAMES:
            self._answer(HTTPStatus.FORBIDDEN, b"ask for this page as 127.0.0.1 or localhost\n")
        elif self.path == "/favicon.ico":  # browsers ask by themselves
            self._answer(HTTPStatus.NO_CONTENT)
        elif self.path != "/":
            self._answer(HTTPStatus.NOT_FOUND, b"there is nothing here but /\n")
        else:
            tag, page = self.live_page.current()
            known = self.headers.get("If-None-Match") == tag
            self._answer(HTTPStatus.NOT_MODIFIED if known else HTTPStatus.OK, b"" if known else page, tag)

    def _answer(self, status: HTTPStatus, body: bytes = b"", tag: str = "") -> None:
        kind = "text/html" if tag else "text/plain"
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")  # the rest stands in the page
        if tag:
            self.send_header("ETag", tag)
        if status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line a second would hide the address."""


def _state(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _has_begun(folder: Path) -> bool:
    """Tell whether the log has its first line; a server makes the file a moment before it writes it."""
    try:
        with RunFolder(folder).log.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return False


def _progress(runs: Sequence[RunSummary]) -> str:
    if len(runs) > 1:
        ended = sum(run.finished for run in runs)
        return (
            f"All {ended} runs have ended." if ended == len(runs) else f"Live: {ended} of {len(runs)} runs have ended."
        )
    run = runs[0]
    done, planned = len(run.rounds), run.config.get("rounds", "?")
    if run.finished:
        return f"The run has ended: {done} of {planned} rounds."
    return f"Live: {done} of {planned} rounds are done."


def _state_of(runs: Sequence[RunSummary]) -> str:
    return "ended" if all(run.finished for run in runs) else "running"


def _status(text: str, state: str, changed: float | None = None) -> str:
    """Return the bar above the page; the script adds how long ago ``changed`` is."""
    since = "" if changed is None else f' data-changed="{changed:.0f}"'
    return (
        f'<div class="live {state}" id="live"{since}><p role="status">{escape(text)}</p>'
        '<p class="age"></p><p class="lost" role="alert" hidden>No answer from "fedsieve watch": this was the last.'
        "</p></div>"
    )


def _waiting_page(folders: Sequence[Path]) -> str:
    names = ", ".join(str(folder) for folder in folders)
    hint = (
        "<p>A run writes its log, run.jsonl, as soon as its sites have joined. This page fills itself then. If the run "
        "has begun already, look whether this is its folder: it is named when the run starts.</p>"
    )
    return document(
        "Live view",
        "No run yet",
        f"Waiting for {names}",
        section("What is awaited", hint),
        "Nothing read yet",
        above=_status(f"Waiting: {names} has no run yet.", "waiting"),
        script=SCRIPT,
    )


def _damaged_page(message: str) -> str:
    body = section("What is wrong", f'<p class="warning">{escape(message)}</p>')
    return document(
        "Live view",
        "This log cannot be read",
        "Nothing is shown rather than something wrong",
        body,
        "The page comes back by itself once the log is whole again",
        above=_status("The log cannot be read.", "damaged"),
        script=SCRIPT,
    )
