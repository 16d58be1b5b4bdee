"""Every format that has a version: where nothing but the version differs, the error says so, and nothing is read."""

import json
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from client.ledger import Ledger
from common import broadcast, coding
from common.coding import SparseUpdate
from common.errors import FedsieveError, LedgerError, RunFolderError, WireError
from common.plan import RoundPlan
from server.checkpoint import Checkpoint
from simulations.experiments.results import Results
from tests.support import small_plan

MODEL = np.array([1.5, -2.25, 0.0, 0.5], np.float32)


def read_update(version: int, path: Path) -> None:
    data = bytearray(coding.encode(SparseUpdate(1, 0, 7, MODEL.size, MODEL), "f32"))
    data[4] = version
    head, body = coding._HEADER.size, data[coding.HEADER_BYTES :]
    coding._CHECKSUM.pack_into(data, head, zlib.crc32(body, zlib.crc32(data[:head])))
    coding.decode(bytes(data), size=MODEL.size, max_kept=MODEL.size, value_coding="f32")


def read_model(version: int, path: Path) -> None:
    data = bytearray(broadcast.encode_floats(MODEL, "f32"))
    data[4] = version
    head, body = broadcast._HEADER.size, data[broadcast._HEAD_BYTES :]
    broadcast._CHECKSUM.pack_into(data, head, zlib.crc32(body, zlib.crc32(data[:head])))
    plan = small_plan(MODEL.size, model_digest=broadcast.digest_of(MODEL))
    broadcast.decode(bytes(data), plan, lambda digest: None)


def read_plan(version: int, path: Path) -> None:
    facts = {**json.loads(small_plan(MODEL.size).to_bytes()), "v": version}
    RoundPlan.from_bytes(json.dumps(facts).encode())


def read_ledger(version: int, path: Path) -> None:
    Ledger.create(path).close()
    _read_database(version, path, lambda: Ledger(path).close())


def read_results(version: int, path: Path) -> None:
    def read() -> None:
        with Results(path):
            pass

    read()
    _read_database(version, path, read)


def _read_database(version: int, path: Path, read: Callable[[], None]) -> None:
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {version}")
    database.close()
    before = path.read_bytes()
    try:
        read()
    finally:
        assert path.read_bytes() == before


def read_checkpoint(version: int, path: Path) -> None:
    Checkpoint(MODEL, "id", 1, 1, 0, 0.0, {}, {}, {}).save(path)
    with np.load(path) as arrays:
        facts = {**json.loads(arrays["facts"].tobytes()), "format": version}
    with path.open("wb") as file:
        np.savez(file, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), model=MODEL)
    Checkpoint.load(path)


Reader = Callable[[int, Path], None]
FORMATS: list[tuple[Reader, int, type[FedsieveError], str]] = [
    (read_update, 1, WireError, "expected update version 1, got {version}; update the older"),
    (read_model, 1, WireError, "expected a model of version 1, got .*; update the older"),
    (read_plan, 3, WireError, "expected a plan of version 3; update the older"),
    (read_ledger, 3, LedgerError, r"newer Fedsieve \(format {version}, this one knows 3\)"),
    (read_results, 1, RunFolderError, "has version {version}, this Fedsieve knows 1"),
    (read_checkpoint, 2, RunFolderError, "was written by another version of Fedsieve"),
]
WRONG = [
    (read, version, error, message.format(version=version))
    for read, known, error, message in FORMATS
    for version in (known - 1, known + 1, 99)
    if version >= known or read not in (read_ledger, read_results)  # older databases are brought up to date
]


@pytest.mark.parametrize(("read", "version"), [case[:2] for case in FORMATS])
def test_the_version_of_today_is_read(read: Reader, version: int, tmp_path: Path) -> None:
    read(version, tmp_path / "file")


@pytest.mark.parametrize(("read", "version", "error", "message"), WRONG)
def test_another_version_is_the_error_of_versions(
    read: Reader, version: int, error: type[FedsieveError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(version, tmp_path / "file")
