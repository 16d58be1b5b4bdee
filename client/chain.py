"""Hash chains: how a ledger notices that something in it was changed or taken out."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from common.errors import LedgerError
from common.files import write_durably

CHAIN_START = "fedsieve/ledger/1"


@dataclass(frozen=True, slots=True)
class Head:
    """How far the chains of entries and of releases went, and the last hash of each."""

    entries: int = 0
    entries_hash: str = CHAIN_START
    releases: int = 0
    releases_hash: str = CHAIN_START


class Chain:
    """Walks a chain and finds out whether it is whole and goes at least as far as the head says."""

    def __init__(self, what: str, known_length: int, known_hash: str) -> None:
        self._what, self._known_length, self._known_hash = what, known_length, known_hash
        self.length, self.hash = 0, CHAIN_START
        self._damaged = 0
        self._found_head = known_length == 0 and known_hash == CHAIN_START

    def add(self, number: int, found_hash: str, expected_hash: str) -> None:
        """Take in the next link: its number, the hash that it has and the one that it should have."""
        self.length += 1
        if not self._damaged and (number != self.length or found_hash != expected_hash):
            self._damaged = self.length
        self.hash = found_hash
        self._found_head |= self.length == self._known_length and found_hash == self._known_hash

    def require_head(self) -> None:
        """Raise ValueError, with what is wrong, unless the chain is whole and reached the head."""
        if self._damaged:
            raise ValueError(f"{self._what} {self._damaged} was changed, or one before it taken out")
        if not self._found_head:
            raise ValueError(
                f"the chain of each {self._what} is {self.length} long but was {self._known_length}: "
                "it was cut or replaced"
            )


def release_hash(previous: str, place: int, number: int, digest: str) -> str:
    """Return the hash of a kept release after one with the hash ``previous``."""
    return hashlib.sha256(json.dumps([previous, place, number, digest]).encode()).hexdigest()


def remember(path: Path, head: Head) -> None:
    """Write the head down; when this returns, it is on the disk."""
    facts = {
        "entries": head.entries,
        "hash": head.entries_hash,
        "releases": head.releases,
        "releases_hash": head.releases_hash,
    }
    try:
        write_durably(path, json.dumps(facts).encode())
    except OSError as error:
        raise LedgerError(f"cannot write {path}: {error}; nothing was released") from error
