"""What holds for every test."""

import os

import pytest

# One thread a process, here and in the processes that tests start: on tensors as small as these a second thread costs
# more than it computes, and where other work runs every operation waits for it. Said before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that must follow each other in one process: nobody waits for them at the end then."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
