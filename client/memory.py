"""Memory of a process that trains."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP = 1 << 30


def keep_freed_memory() -> None:
    """Have glibc keep what tensors free for the next ones: else every step faults the same pages in again."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # musl has none
            for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
                libc.mallopt(option, _KEEP)
