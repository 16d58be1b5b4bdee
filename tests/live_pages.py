"""The live page as tests ask for it: over HTTP, from a server of its own."""

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simulations.report.live import live_server


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """Serve the live page of these run folders and give its address."""
    with live_server(folders, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Return the code, the text and the entity tag of an answer."""
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), answer.headers["ETag"] or ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers["ETag"] or ""


def status_of(page: str) -> str:
    """Return what the page says of the run's progress."""
    found = re.search(r'<p role="status">(.*?)</p>', page)
    assert found is not None
    return found[1]
