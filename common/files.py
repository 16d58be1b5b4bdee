"""Files that must survive a crash."""

import os
from pathlib import Path


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Replace a file so that it is either the old one or the whole new one, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
