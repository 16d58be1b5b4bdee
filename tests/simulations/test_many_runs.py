"""How long many runs will take, and what becomes of those that fail."""

import fcntl
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
from simulations.crew import Piece, Progress, Workers, _carry_out_remotely, _OnRay, carry_out
from simulations.many_runs import Clock, Display, alone, carried_out, config_to_start, finished, work_of
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


def test_the_bar_counts_what_is_done_of_the_pieces_under_way() -> None:
    with Display(4, 1, Console(file=io.StringIO(), force_terminal=True)) as display:
        (bar,) = display._progress.tasks
        seen = [(bar.total, bar.completed, bar.description)]
        for change in (
            lambda: display.start("one", None),
            lambda: display.start("two", 1e-3),
            lambda: display.advance("one", 0.5, 90.0),
            lambda: display.end("one", "done"),
            lambda: display.advance("two", 0.25, 2.0),
        ):
            change()
            (bar,) = display._progress.tasks
            seen.append((bar.completed, bar.description, bar.fields["left"]))
    assert seen == [
        (4, 1, "starting ..."),
        (1.0, "one", ""),
        (1.0, "one, two", "1 s left"),
        (1.5, "one, two", "1 min 30 s left"),
        (2, "one, two", "1 min 30 s left"),
        (2.25, "two", "2 s left"),
    ]


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
        self.options: list[dict[str, int]] = []
        monkeypatch.setattr(ray, "remote", lambda **options: self.options.append(options) or self.remote)
        monkeypatch.setattr(ray, "wait", self.wait)
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

    def wait(self, references: list[object], num_returns: int, timeout: float) -> tuple[list[object], list[object]]:
        if not num_returns <= len(references):
            raise ValueError("num_returns")
        return references[:num_returns], references[num_returns:]

    def get(self, asked: Any) -> Any:
        if isinstance(asked, dict):
            return asked
        try:
            return self.under_way.pop(asked)()
        except Exception as error:
            raise ray.exceptions.RayTaskError("piece", "its stack", error) from None


@pytest.mark.parametrize(
    ("jobs", "cpus", "at_once"),
    [(3, {"CPU": 8.0}, 3), (0, {"CPU": 2.0}, 2), (0, {"CPU": 0.5}, 1), (0, {}, 1), (9, {}, 5)],
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
    assert inline.options == [{"num_cpus": 0}, {"num_cpus": 1, "max_retries": 2}]
    assert inline.most == at_once and not inline.under_way and not inline.is_up
    assert kept == {"piece 1": 1, "piece 4": 4, "piece 5": 5}
    assert failures == ["piece 2: ZeroDivisionError: by nothing", "piece 3: in its own words"]
    assert "run 2/6: piece 1; " in screen.file.getvalue()  # type: ignore[attr-defined]
    assert "1 of 6 runs were done already" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_what_workers_say_of_how_far_they_are_is_shown_of_what_is_still_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inline = InlineRay(monkeypatch, {})
    board = SimpleNamespace(take=SimpleNamespace(remote=lambda: {"piece 1": 0.5, "another": 0.25}))
    made = iter([board, "a reference"])
    monkeypatch.setattr(inline, "remote", lambda what: SimpleNamespace(remote=lambda *_: next(made)))
    watched: list[tuple[Any, ...]] = []
    watch = SimpleNamespace(start=lambda *said: watched.append(said), advance=lambda *said: watched.append(said))
    monkeypatch.setattr(ray, "get", lambda asked: asked)
    pieces = [Piece("piece 1", 1.0, _piece, (1,))]
    with _OnRay(Workers(jobs=2)) as crew:
        assert [piece for piece, _ in crew.results(pieces, watch)] == pieces  # type: ignore[arg-type]
    assert watched == [("piece 1",), ("piece 1", 0.5)]


def test_a_worker_says_how_far_it_is_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    said, kept = list[tuple[str, float]](), list[bool]()
    board = SimpleNamespace(put=SimpleNamespace(remote=lambda name, share: said.append((name, share))))

    def piece(size: int, progress: Progress) -> int:
        for now in (0.75, 1.25, 1.5, 2.25):
            monkeypatch.setattr("time.monotonic", lambda now=now: now)
            progress(now / size)
        return size

    monkeypatch.setattr("simulations.crew.keep_freed_memory", lambda: kept.append(True))
    assert _carry_out_remotely("it", piece, (4,), board) == 4 and kept
    assert said == [("it", 0.75 / 4), ("it", 1.5 / 4), ("it", 2.25 / 4)]


def test_a_second_runner_waits_for_the_first(tmp_path: Path) -> None:
    with alone(tmp_path / "x"), (tmp_path / ".x.lock").open("w") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
    assert "piece 3: FAILED: in its own words\n" in screen.file.getvalue()  # type: ignore[attr-defined]
