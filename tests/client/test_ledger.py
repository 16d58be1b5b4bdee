import json
import math
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from client.ledger import Entry, Ledger
from common.charges import Charge, merged
from common.errors import LedgerError
from common.plan import RoundPlan
from tests.support import small_plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "site" / "ledger.db"


def plan_of(round_number: int, run: str = "a", **changes: object) -> RoundPlan:
    return small_plan(10, round=round_number, run=run, **{"noise_multiplier": 1.5, "steps": 3, **changes})


def charge(ledger: Ledger, round_number: int, run: str = "a", **changes: object) -> Entry:
    plan = plan_of(round_number, run, **changes)
    return ledger.charge(plan, plan.to_bytes(), "")


def filled(path: Path, rounds: int = 3) -> None:
    ledger = Ledger.create(path)
    for number in range(1, rounds + 1):
        ledger.keep(charge(ledger, number), b"release %d" % number)
    ledger.close()


def test_charges_and_releases_are_there_again_after_a_restart(path: Path) -> None:
    filled(path)
    ledger = Ledger(path)
    assert [entry.round for entry in ledger.entries()] == [1, 2, 3]
    assert ledger.history == (Charge(1.5, 1.0, 9),)
    entry = ledger.find("", "a", 2)
    assert entry is not None and ledger.release_of(entry) == b"release 2"
    assert ledger.find("", "a", 4) is None and ledger.find("", "b", 2) is None and ledger.find("x", "a", 2) is None


def test_runs_on_the_same_data_compose(path: Path) -> None:
    ledger = Ledger.create(path)
    charge(ledger, 1, "a")
    charge(ledger, 1, "b", noise_multiplier=2.0)
    charge(ledger, 2, "b", noise_multiplier=2.0)
    assert ledger.history == (Charge(1.5, 1.0, 3), Charge(2.0, 1.0, 6))


def test_a_round_is_charged_once_and_never_without_privacy(path: Path) -> None:
    ledger = Ledger.create(path)
    charge(ledger, 1)
    with pytest.raises(LedgerError, match="UNIQUE"):
        charge(ledger, 1)
    with pytest.raises(LedgerError, match="without privacy"):
        charge(ledger, 2, private=False)
    assert ledger.history == (Charge(1.5, 1.0, 3),)
    assert charge(ledger, 2).number == 2


def test_a_ledger_is_never_begun_by_accident_or_anew(path: Path) -> None:
    with pytest.raises(LedgerError, match="fedsieve ledger create"):
        Ledger(path)
    filled(path)
    with pytest.raises(LedgerError, match="exists already"):
        Ledger.create(path)
    path.unlink()
    with pytest.raises(LedgerError, match="restore"):
        Ledger(path)
    with pytest.raises(LedgerError, match="exists already"):
        Ledger.create(path)


def tamper(statement: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        with sqlite3.connect(path) as database:
            database.execute(statement)
        database.close()

    return apply


def rehash_last(path: Path) -> None:
    """Change an entry and give it the right hash again: only the head can tell."""
    ledger = Ledger(path)
    *_, before, last = ledger.entries()
    ledger.close()
    forged = Entry(3, last.time, last.server, last.run, last.round, Charge(99.0, 1.0, 3), last.plan, "")
    tamper(f"UPDATE entries SET noise_multiplier = 99, hash = '{forged.expected_hash(before.hash)}' WHERE number = 3")(
        path
    )


def break_an_index(path: Path) -> None:
    """Have an index say another thing than its table, which every row of the table hides."""
    for statement in (
        "CREATE INDEX extra ON entries (run)",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE INDEX extra ON entries (time)' "
        "WHERE name = 'extra'",
    ):
        database = sqlite3.connect(path)
        database.executescript(statement)
        database.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_an_index, "is damaged"),
        (tamper("UPDATE entries SET noise_multiplier = 99 WHERE number = 2"), "entry 2 was changed"),
        (tamper("UPDATE entries SET steps = 1 WHERE number = 3"), "entry 3 was changed"),
        (tamper("UPDATE entries SET sampling_rate = 0 WHERE number = 1"), "entry 1 .* was changed"),
        (tamper("DELETE FROM entries WHERE number = 2"), "entry 2 was changed, or one before it taken out"),
        (tamper("DELETE FROM entries WHERE number = 3"), "is 2 long but was 3"),
        (tamper("DELETE FROM entries"), "is 0 long but was 3"),
        (rehash_last, "is 3 long but was 3: it was cut or replaced"),
        (tamper("DELETE FROM releases WHERE number = 3"), "each release is 2 long but was 3"),
        (tamper("DELETE FROM releases WHERE number = 1"), "release 1 was changed, or one before it taken out"),
        (tamper("UPDATE releases SET digest = 'other' WHERE number = 2"), "release 2 was changed"),
        (tamper("PRAGMA user_version = 99"), "newer Fedsieve"),
        (tamper("DROP TABLE entries"), "cannot be read or written"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "ledger"),
        (lambda path: path.write_bytes(b"not a database" * 500), "cannot be read or written|cannot use"),
        (lambda path: path.write_bytes(b""), "is 0 long but was 3"),
        (lambda path: path.with_name("ledger.db.head").unlink(), "cannot read .*head"),
        (lambda path: path.with_name("ledger.db.head").write_text("{}"), "cannot read .*head"),
    ],
)
def test_a_damaged_ledger_is_refused_with_the_way_out(path: Path, change: Callable[[Path], None], message: str) -> None:
    filled(path)
    change(path)
    with pytest.raises(LedgerError, match=message) as caught:
        Ledger(path)
    assert any(word in str(caught.value) for word in ("backup", "update Fedsieve", "cannot be read"))


def test_a_ledger_that_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)

    def connect(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(LedgerError, match=r"cannot use the ledger .*: unable to open"):
        Ledger(path)


def test_a_release_that_was_changed_is_not_released_again(path: Path) -> None:
    filled(path)
    tamper("UPDATE releases SET data = 'other' WHERE number = 2")(path)
    ledger = Ledger(path)
    first, second, _ = ledger.entries()
    assert ledger.release_of(first) == b"release 1"
    with pytest.raises(LedgerError, match=r"release of entry 2 .* was changed"):
        ledger.release_of(second)


def test_releases_may_be_kept_in_another_order_than_their_charges(path: Path) -> None:
    ledger = Ledger.create(path)
    first, second = charge(ledger, 1), charge(ledger, 2)
    ledger.keep(second, b"second")
    ledger.keep(first, b"first")
    ledger.close()
    ledger = Ledger(path)
    assert [ledger.release_of(entry) for entry in ledger.entries()] == [b"first", b"second"]


def test_a_crash_between_the_entry_and_the_head_is_healed(path: Path) -> None:
    filled(path, 2)
    head = path.with_name("ledger.db.head")
    before = head.read_text()
    ledger = Ledger(path)
    charge(ledger, 3)
    ledger.close()
    after = head.read_text()
    head.write_text(before)
    ledger = Ledger(path)
    assert len(list(ledger.entries())) == 3
    assert head.read_text() == after and json.loads(after)["entries"] == 3


def test_entries_are_synced_to_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import common.files

    ledger = Ledger.create(path)
    assert ledger._database.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA: the file and its folder
    assert ledger._database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    synced = []
    fsync = common.files.os.fsync
    monkeypatch.setattr(common.files.os, "fsync", lambda file: synced.append(file) or fsync(file))
    charge(ledger, 1)
    assert len(synced) == 2  # the head, and its folder


def test_two_processes_cannot_hold_the_same_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import client.ledger

    filled(path)
    first = Ledger(path)
    connect = sqlite3.connect
    monkeypatch.setattr(client.ledger.sqlite3, "connect", lambda *a, **k: connect(*a, **{**k, "timeout": 0.1}))
    with pytest.raises(LedgerError, match="held by another process"):
        Ledger(path)
    first.close()
    Ledger(path).close()


@pytest.mark.parametrize(
    ("odd", "change"),
    [
        (Charge(math.inf, 0.5, 3, pure_epsilon=0.25), "pure_epsilon = 0.1"),
        (Charge(2.0, 0.5, 3, selection_rho=0.25, selecting_steps=2), "selecting_steps = 1"),
    ],
)
def test_charges_of_every_kind_survive_and_cannot_be_changed(tmp_path: Path, odd: Charge, change: str) -> None:
    class Odd:
        """A plan whose charge is no sampled Gaussian."""

        run, round, charge = "odd", 1, odd

    path = tmp_path / "odd.ledger"
    ledger = Ledger.create(path)
    ledger.charge(Odd(), b"plan", "")  # type: ignore[arg-type]
    ledger.close()
    again = Ledger(path)
    assert again.history == merged([odd])
    again.close()
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE entries SET {change}")
    database.close()
    with pytest.raises(LedgerError, match="entry 1 was changed"):
        Ledger(path)


def test_a_ledger_from_before_other_charges_is_read_as_it_was(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "old.ledger")
    charge(ledger, 1)
    history = ledger.history
    ledger.close()
    with sqlite3.connect(tmp_path / "old.ledger") as database:  # undo the migration
        database.execute("ALTER TABLE entries DROP COLUMN selection_rho")
        database.execute("ALTER TABLE entries DROP COLUMN pure_epsilon")
        database.execute("ALTER TABLE entries DROP COLUMN selecting_steps")
        database.execute("PRAGMA user_version = 1")
    database.close()
    ledger = Ledger(tmp_path / "old.ledger")
    assert ledger.history == history
    ledger.close()


def test_a_ledger_is_its_owners_alone(path: Path) -> None:
    Ledger.create(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
