"""How long many runs will take, and what becomes of those that fail."""

import io

import pytest
from rich.console import Console

from common.errors import FedsieveError
from simulations.crew import Piece, Progress, Workers, carry_out
from simulations.many_runs import Clock


def test_time_left_comes_from_what_others_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = Clock({"short": 4, "long": 9})
    assert clock.left() is None
    clock.start("short")
    now = 110.0
    assert clock.left() is None, "nothing of it is done yet"
    clock.advance("short", 0.5)
    assert clock.left() == pytest.approx((2 + 9) * 5)
    now = 120.0
    assert clock.end("short") == 20
    assert clock.left() == pytest.approx(9 * 5)


def test_time_left_with_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = Clock({"a": 10, "b": 10, "c": 10}, earlier=[(10, 50)], workers=2)
    assert clock.left() == pytest.approx(30 * 5 / 2)
    clock.start("a")
    clock.start("b")
    now = 110.0
    clock.advance("a", 0.5)  # 5 work in 10 s; b has not said anything
    assert clock.left() == pytest.approx(25 * (60 / 15) / 2)
    now = 120.0
    for name in ("a", "b"):
        clock.end(name)
    assert clock.left() == pytest.approx(10 * (90 / 30)), "one piece occupies one worker"


def _piece(number: int, progress: Progress) -> int:
    if number == 2:
        raise ZeroDivisionError("by nothing")
    if number == 3:
        raise FedsieveError("in its own words")
    progress(1.0)
    return number


def test_whatever_ends_a_piece_does_not_stop_the_others() -> None:
    pieces = [Piece(f"piece {number}", 1.0, _piece, (number,)) for number in range(1, 5)]
    kept: list[int] = []

    def keep(name: str, result: int, seconds: float) -> str:
        kept.append(result)
        return "kept"

    screen = Console(file=io.StringIO(), width=100)
    failures = carry_out(pieces, [], Workers(in_process=True), screen, keep)
    assert kept == [1, 4]
    assert failures == ["piece 2: ZeroDivisionError: by nothing", "piece 3: in its own words"]
