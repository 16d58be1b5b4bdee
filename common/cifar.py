"""CIFAR-10 in its official binary form: five training batches and a test batch."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DatasetError

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
_SHAPE = (3, 32, 32)
_RECORD_BYTES = 1 + 3 * 32 * 32
_CLASSES = 10


def is_cifar(folder: Path) -> bool:
    """Tell whether a folder holds the binary batches."""
    return (folder / TEST_FILE).exists()


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Return pictures (uint8, 3 x 32 x 32) and classes of a folder of .bin files, or of the archive that they come in.

    A record is one byte of class and 3,072 bytes of picture, all red ones first, row by row.
    """
    contents = _from_archive(path) if path.suffixes[-2:] == [".tar", ".gz"] else _from_folder(path)
    train = [_parsed(path, name, contents[name]) for name in TRAIN_FILES]
    test_inputs, test_targets = _parsed(path, TEST_FILE, contents[TEST_FILE])
    return {
        "train_inputs": np.concatenate([inputs for inputs, _ in train]),
        "train_targets": np.concatenate([targets for _, targets in train]),
        "test_inputs": test_inputs,
        "test_targets": test_targets,
    }


def _from_folder(folder: Path) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in (*TRAIN_FILES, TEST_FILE)}
    except OSError as error:
        raise DatasetError(
            f"cannot read CIFAR-10 in {folder}: {error}; expected {', '.join(TRAIN_FILES)} and {TEST_FILE}"
        ) from error


def _from_archive(path: Path) -> dict[str, bytes]:
    wanted, found = {*TRAIN_FILES, TEST_FILE}, {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name in wanted and (file := archive.extractfile(member)) is not None:
                    found[name] = file.read()
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    if missing := sorted(wanted - found.keys()):
        raise DatasetError(f"{path} lacks {', '.join(missing)}: expected the archive of CIFAR-10's binary version")
    return found


def _parsed(path: Path, name: str, content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if not content or len(content) % _RECORD_BYTES:
        raise DatasetError(
            f"{path}: expected {name} to hold records of {_RECORD_BYTES} bytes each, got {len(content)} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)
    targets = records[:, 0].astype(np.int64)
    if targets.max() >= _CLASSES:
        raise DatasetError(f"{path}: expected classes below {_CLASSES} in {name}, got {targets.max()}")
    return records[:, 1:].reshape(-1, *_SHAPE), targets
