"""What holds for every test."""

import os
import tempfile
from collections.abc import Iterator

import pytest

# One thread a process, here and in the processes that tests start: on tensors as small as these a second thread costs
# more than it computes, and where other work runs every operation waits for it. Said before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _folder_for_ray() -> Iterator[None]:
    """Keep the Ray of these tests apart: it joins any cluster whose address is in its folder, which others share.

    Below /tmp, as Ray's own folder is: the names of its sockets may not be long.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("RAY_TMPDIR", folder)
        yield
