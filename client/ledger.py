"""The privacy ledger: what a site has spent, durable before anything is released.

One SQLite file that the site's operator owns. An entry is one charge: who asked, in which run and round, for how many
noisy steps. The release that a charge paid for is kept: whoever asks for the same round again gets the same bytes, and
never a second draw. Entries form a hash chain, and so do releases, in the order in which they were kept; a small file
beside the ledger (``NAME.head``) remembers how far both went, so that one that was changed or taken out is noticed.

The file never knows less than the world: an entry is on the disk before its release exists. A crash in between leaves a
charge without a release; the same round can then be carried out under that charge.
"""

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from client.chain import Chain, Head, release_hash, remember
from common.charges import Charge, History, merged
from common.errors import AccountingError, LedgerError
from common.plan import RoundPlan

# Each runs once, in order; the number of those that ran is the file's user_version. Never change one: add one.
_MIGRATIONS = (
    """
    CREATE TABLE entries (
        number INTEGER PRIMARY KEY,
        time REAL NOT NULL,
        server TEXT NOT NULL,
        run TEXT NOT NULL,
        round INTEGER NOT NULL,
        noise_multiplier REAL NOT NULL,
        sampling_rate REAL NOT NULL,
        steps INTEGER NOT NULL,
        plan TEXT NOT NULL,
        hash TEXT NOT NULL,
        UNIQUE (server, run, round)
    );
    CREATE TABLE releases (
        place INTEGER PRIMARY KEY,
        number INTEGER NOT NULL UNIQUE REFERENCES entries (number),
        digest TEXT NOT NULL,
        hash TEXT NOT NULL,
        data BLOB NOT NULL
    );
    """,
    """
    ALTER TABLE entries ADD COLUMN selection_rho REAL NOT NULL DEFAULT 0;
    ALTER TABLE entries ADD COLUMN pure_epsilon REAL NOT NULL DEFAULT 0;
    """,
    "ALTER TABLE entries ADD COLUMN selecting_steps INTEGER NOT NULL DEFAULT 0",
)
_COLUMNS = (
    "number, time, server, run, round, noise_multiplier, sampling_rate, steps, selection_rho, pure_epsilon, "
    "selecting_steps, plan, hash"
)
_WAY_OUT = "restore the ledger and its .head file from a backup; without one, what was spent is not known"


@dataclass(frozen=True, slots=True)
class Entry:
    """One charge. ``server`` is the key that signed the plan, empty where none did; ``plan`` is the plan's SHA-256."""

    number: int
    time: float
    server: str
    run: str
    round: int
    charge: Charge
    plan: str
    hash: str

    def expected_hash(self, previous: str) -> str:
        """Return the hash of this entry after one with the hash ``previous``."""
        facts = [
            previous,
            self.number,
            self.time,
            self.server,
            self.run,
            self.round,
            *self.charge.to_json(),
            self.plan,
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class Ledger:
    """An open ledger; one process at a time may hold it."""

    def __init__(self, path: Path) -> None:
        """Open and verify a ledger. One that is missing, damaged or too new is a LedgerError that says the way out."""
        self._path = path
        self._head = path.with_name(path.name + ".head")
        if not path.is_file():
            lost = f"; {self._head.name} is still there, so it has been used: {_WAY_OUT}" if self._head.exists() else ""
            raise LedgerError(f"no ledger at {path}: make one with 'fedsieve ledger create {path}'{lost}")
        try:
            # EXTRA: the folder is synced too, so that a committed entry cannot come undone in a power cut.
            self._database = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
            for setting in ("locking_mode = EXCLUSIVE", "journal_mode = DELETE", "synchronous = EXTRA"):
                self._execute(f"PRAGMA {setting}")
            with self._transaction():
                self._migrate()
            self._history = self._verified_history()
        except sqlite3.Error as error:
            raise LedgerError(f"cannot use the ledger {path}: {error}; {_WAY_OUT}") from error

    def _in_use(self) -> LedgerError:
        return LedgerError(
            f"{self._path} is held by another process, such as a running daemon: ask it with 'fedsieve site status', "
            "or stop it first"
        )

    @classmethod
    def create(cls, path: Path) -> "Ledger":
        """Make a new, empty ledger; never over an old one."""
        head = path.with_name(path.name + ".head")
        for existing in (path, head):
            if existing.exists():
                raise LedgerError(f"{existing} exists already: a site's ledger is never begun anew")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        remember(head, Head())
        return cls(path)

    @property
    def length(self) -> int:
        """How many charges there are."""
        return self._known.entries

    @property
    def history(self) -> History:
        """Everything that was charged, over all runs."""
        return self._history

    def entries(self) -> Iterator[Entry]:
        """Yield all charges in order."""
        yield from self._entries()

    def find(self, server: str, run: str, round_number: int) -> Entry | None:
        """Return the charge of a round, if it was charged."""
        return next(self._entries("WHERE server = ? AND run = ? AND round = ?", (server, run, round_number)), None)

    def release_of(self, entry: Entry) -> bytes | None:
        """Return the release that a charge paid for, if it came to be."""
        row = self._execute("SELECT data, digest FROM releases WHERE number = ?", (entry.number,)).fetchone()
        if row is None:
            return None
        if not isinstance(row[0], bytes) or hashlib.sha256(row[0]).hexdigest() != row[1]:
            raise LedgerError(f"the release of entry {entry.number} of {self._path} was changed: {_WAY_OUT}")
        return row[0]

    def charge(self, plan: RoundPlan, plan_bytes: bytes, server: str) -> Entry:
        """Write down what ``plan`` costs; when this returns, it is on the disk."""
        charge = plan.charge
        if charge is None:
            raise LedgerError(f"run {plan.run!r} asks for round {plan.round} without privacy: nothing can be charged")
        with self._transaction():
            number, previous = self._known.entries, self._known.entries_hash
            digest = hashlib.sha256(plan_bytes).hexdigest()
            entry = Entry(number + 1, time.time(), server, plan.run, plan.round, charge, digest, hash="")
            entry = replace(entry, hash=entry.expected_hash(previous))
            self._execute(
                f"INSERT INTO entries ({_COLUMNS}) VALUES ({', '.join('?' * 13)})",
                (
                    entry.number,
                    entry.time,
                    server,
                    plan.run,
                    plan.round,
                    charge.noise_multiplier,
                    charge.sampling_rate,
                    charge.steps,
                    charge.selection_rho,
                    charge.pure_epsilon,
                    charge.selecting_steps,
                    entry.plan,
                    entry.hash,
                ),
            )
        self._history = merged((*self._history, charge))
        self._remember(replace(self._known, entries=entry.number, entries_hash=entry.hash))
        return entry

    def keep(self, entry: Entry, release: bytes) -> None:
        """Keep the release of a charge; when this returns, it is on the disk and may leave the site."""
        digest, place = hashlib.sha256(release).hexdigest(), self._known.releases + 1
        chained = release_hash(self._known.releases_hash, place, entry.number, digest)
        with self._transaction():
            self._execute(
                "INSERT INTO releases VALUES (?, ?, ?, ?, ?)", (place, entry.number, digest, chained, release)
            )
        self._remember(replace(self._known, releases=place, releases_hash=chained))

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _migrate(self) -> None:
        (version,) = self._execute("PRAGMA user_version").fetchone()
        if version > len(_MIGRATIONS):
            raise LedgerError(
                f"{self._path} was written by a newer Fedsieve (format {version}, this one knows {len(_MIGRATIONS)}): "
                "update Fedsieve at this site"
            )
        for number, script in enumerate(_MIGRATIONS[version:], start=version + 1):
            for statement in filter(str.strip, script.split(";")):
                self._execute(statement)
            self._execute(f"PRAGMA user_version = {number}")

    def _verified_history(self) -> History:
        """Check the whole chain against itself and against the head; return what it adds up to."""
        (finding,) = self._execute("PRAGMA integrity_check").fetchone()
        if finding != "ok":
            raise LedgerError(f"{self._path} is damaged ({finding}): {_WAY_OUT}")
        known = self._read_head()
        entries, charges = Chain("entry", known.entries, known.entries_hash), []
        for entry in self._entries():
            entries.add(entry.number, entry.hash, entry.expected_hash(entries.hash))
            charges.append(entry.charge)
        releases = Chain("release", known.releases, known.releases_hash)
        for place, number, digest, chained in self._execute(
            "SELECT place, number, digest, hash FROM releases ORDER BY place"
        ):
            releases.add(place, chained, release_hash(releases.hash, place, number, digest))
        try:
            entries.require_head()
            releases.require_head()
        except ValueError as error:
            raise LedgerError(f"{self._path}: {error}; {_WAY_OUT}") from error
        # What is more than the head knew of was written right before a crash.
        self._known = known
        now = Head(entries.length, entries.hash, releases.length, releases.hash)
        if now != known:
            self._remember(now)
        return merged(charges)

    def _read_head(self) -> Head:
        try:
            raw = json.loads(self._head.read_text())
            return Head(int(raw["entries"]), str(raw["hash"]), int(raw["releases"]), str(raw["releases_hash"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LedgerError(
                f"cannot read {self._head}, which says how long the ledger is ({error}): {_WAY_OUT}"
            ) from error

    def _remember(self, head: Head) -> None:
        remember(self._head, head)
        self._known = head

    def _entries(self, where: str = "", parameters: tuple[object, ...] = ()) -> Iterator[Entry]:
        for row in self._execute(f"SELECT {_COLUMNS} FROM entries {where} ORDER BY number", parameters):
            number, at, server, run, round_number, *mechanism, plan, digest = row
            try:
                charge = Charge(*mechanism)
            except (AccountingError, TypeError) as error:
                raise LedgerError(f"entry {number} of {self._path} was changed ({error}): {_WAY_OUT}") from error
            yield Entry(number, at, server, run, round_number, charge, plan, digest)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _execute(self, statement: str, parameters: tuple[object, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, parameters)
        except sqlite3.Error as error:
            if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise self._in_use() from error
            raise LedgerError(f"the ledger {self._path} cannot be read or written: {error}") from error
