"""How long many runs will take, and what becomes of those that fail."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from rich.console import Console

from common.config import RunConfig
from common.errors import FedsieveError, NothingLearned
from server.runfolder import RunFolder
from simulations.crew import Piece, Progress, Workers, carry_out
from simulations.many_runs import Clock, Display, carried_out, config_to_start, finished, work_of
from tests.run_logs import end_event, round_event, start_event, write_log
from tests.support import small_config


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


def test_the_work_of_a_run_is_the_share_of_the_records_that_it_looks_at(tmp_path: Path) -> None:
    config = small_config(tmp_path, rounds=4, steps_per_round=3, sampling_rate=0.5, sites=6, cohort=2)
    assert work_of(config) == pytest.approx(4 * 3 * 0.5 * 2 / 6)


def left_behind(config: RunConfig, *, ended: bool) -> Path:
    """Write what a run with this config leaves that was stopped before its first checkpoint, or that ended."""
    return write_log(RunFolder.create(config).path, start_event(), [round_event(1)], end_event(1) if ended else None)


def test_a_run_counts_where_it_has_ended_with_the_config_that_is_wanted(tmp_path: Path) -> None:
    wanted, other = small_config(tmp_path, name="x", rounds=1), small_config(tmp_path, name="x", rounds=2)
    assert finished(wanted) is None, "there is nothing"
    folder = left_behind(wanted, ended=True)
    summary = finished(wanted)
    assert summary is not None and summary.folder == folder
    assert finished(other) is None, "it was another run"
    (tmp_path / "x").rename(tmp_path / "y")
    left_behind(wanted, ended=False)
    assert finished(wanted) is None, "it was stopped"


def test_what_is_in_the_way_is_removed_and_what_was_found_is_kept(tmp_path: Path) -> None:
    wanted, other = small_config(tmp_path, name="x", rounds=1), small_config(tmp_path, name="x", rounds=2)
    assert config_to_start(wanted) == wanted
    for kept in (["x.1"], ["x.1", "x.2"]):
        left_behind(other, ended=True)
        assert config_to_start(wanted) == wanted
        assert sorted(path.name for path in tmp_path.iterdir()) == kept
    for config in (wanted, other):
        left_behind(config, ended=False)
        assert config_to_start(wanted) == wanted and not (tmp_path / "x").exists()
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.jsonl").write_text("no log")
    assert config_to_start(wanted) == wanted and not (tmp_path / "x").exists()
    (left_behind(wanted, ended=False) / "checkpoint.npz").touch()
    assert config_to_start(wanted).resume and (tmp_path / "x").exists()


def test_a_run_is_carried_out_once_and_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("simulations.ray_grid.RayGrid")
    config, told = small_config(tmp_path / "some" / "where", name="x", rounds=2), list[float]()
    assert carried_out(config, told.append).finished and told == [0.5, 1.0]
    assert carried_out(config, told.append).finished and told == [0.5, 1.0]


def test_a_run_that_learnt_nothing_begins_anew_once_what_was_wrong_is_mended(tmp_path: Path) -> None:
    broken = tmp_path / "data.npz"
    targets = np.full(12, 2)  # of 3 classes, where the model tells 2 apart
    arrays = {"train_inputs": np.ones((12, 4)), "test_inputs": np.ones((0, 4)), "test_targets": np.zeros(0, np.int64)}
    np.savez(broken, train_targets=targets, **arrays)
    small = {"dataset": str(broken), "model": "mlp:4-2", "rounds": 1, "sites": 2, "sampling_rate": 1.0}
    config = small_config(tmp_path, name="x", **small)
    with pytest.raises(NothingLearned):
        carried_out(config, lambda done: None)
    np.savez(broken, train_targets=targets - 1, **arrays)
    assert carried_out(config, lambda done: None).finished


def test_what_is_under_way_is_said_in_lines_or_on_a_bar() -> None:
    said = {}
    for terminal in (False, True):
        screen = Console(file=io.StringIO(), width=60, force_terminal=terminal, color_system=None)
        with Display(3, 1, screen) as display:
            display.start("one", None)
            display.start("two", 90.4)
            display.end("one", "[red] " + "a long result " * 9)
        said[terminal] = screen.file.getvalue()  # type: ignore[attr-defined]
    assert said[False].splitlines() == [
        "run 2/3: one; time left unknown",
        "run 3/3: two; 1 min 30 s left",
        "one: [red] " + "a long result " * 9,
    ]
    assert "run 2/3: " not in said[True] and "run 2/3 " in said[True] and "one, two 1 min 30 s left" in said[True]


def _piece(number: int, progress: Progress) -> int:
    if number == 2:
        raise ZeroDivisionError("by nothing")
    if number == 3:
        raise FedsieveError("in its own words")
    progress(1.0)
    return number


class InlineRay:
    """Ray as far as a crew uses it: a piece is done in this process, when somebody asks for its result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpus: dict[str, float]) -> None:
        self.under_way: dict[object, Callable[[], Any]] = {}
        self.most = 0
        self.is_up: list[str | None] = []
        monkeypatch.setattr("simulations.ray_grid.start_ray", lambda address: self.is_up.append(address) or True)
        monkeypatch.setattr(ray, "shutdown", self.is_up.clear)
        monkeypatch.setattr(ray, "cluster_resources", lambda: cpus)
        monkeypatch.setattr(ray, "remote", lambda **options: self.remote)
        monkeypatch.setattr(ray, "wait", lambda references, **options: (references[:1], references[1:]))
        monkeypatch.setattr(ray, "get", self.get)

    def remote(self, what: Callable[..., Any]) -> Any:
        if isinstance(what, type):
            board = what()
            methods = {name: SimpleNamespace(remote=getattr(board, name)) for name in ("put", "take")}
            return SimpleNamespace(remote=lambda: SimpleNamespace(**methods))
        return SimpleNamespace(remote=lambda *arguments: self.start(lambda: what(*arguments)))

    def start(self, call: Callable[[], Any]) -> object:
        reference = object()
        self.under_way[reference] = call
        self.most = max(self.most, len(self.under_way))
        return reference

    def get(self, asked: Any) -> Any:
        if isinstance(asked, dict):
            return asked
        try:
            return self.under_way.pop(asked)()
        except Exception as error:
            raise ray.exceptions.RayTaskError("piece", "its stack", error) from None


@pytest.mark.parametrize(
    ("jobs", "cpus", "at_once"), [(3, {"CPU": 8.0}, 3), (0, {"CPU": 2.0}, 2), (0, {"CPU": 0.5}, 1), (9, {}, 5)]
)
def test_as_many_at_a_time_as_asked_for(
    jobs: int, cpus: dict[str, float], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = InlineRay(monkeypatch, cpus)
    kept: dict[str, int] = {}

    def keep(name: str, result: int, seconds: float) -> str:
        assert inline.is_up == ["a:1"]
        kept[name] = result
        return "kept"

    pieces = [Piece(f"piece {number}", 1.0, _piece, (number,)) for number in range(1, 6)]
    screen = Console(file=io.StringIO(), width=100)
    failures = carry_out(pieces, [(1.0, 5.0)], Workers(jobs=jobs, ray_address="a:1"), screen, keep)
    assert inline.most == at_once and not inline.under_way and not inline.is_up
    assert kept == {"piece 1": 1, "piece 4": 4, "piece 5": 5}
    assert failures == ["piece 2: ZeroDivisionError: by nothing", "piece 3: in its own words"]
    assert "run 2/6: piece 1; " in screen.file.getvalue()  # type: ignore[attr-defined]
    assert "1 of 6 runs were done already" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_where_nothing_is_missing_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(address: str | None) -> bool:
        raise AssertionError("Ray was started for nothing")

    monkeypatch.setattr("simulations.ray_grid.start_ray", start)
    assert carry_out([], [(1.0, 5.0)], Workers(), Console(quiet=True), lambda *done: "") == []


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
