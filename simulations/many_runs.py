"""What everything that carries out many runs shares: what is done stays done, what was stopped goes on, time left."""

import fcntl
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from common.config import RunConfig
from common.errors import FedsieveError, NothingLearned
from server.runfolder import RunFolder
from server.runlog import Event
from simulations.report import words
from simulations.report.summary import RunSummary, load_run
from simulations.run import Engine, config_of_run, simulate


def folder_of(config: RunConfig) -> Path:
    """Return where a run with a name is, or will be."""
    return Path(config.out) / config.name


def finished(config: RunConfig) -> RunSummary | None:
    """Return the summary of a run that has ended and had the config that is wanted now."""
    summary = _readable(config)
    return summary if summary is not None and summary.finished else None


def config_to_start(config: RunConfig) -> RunConfig:
    """Return the config with which a run that is not done goes on, or starts.

    What cannot go on is removed; a run that ended with another config stays, under a name with a number.
    """
    folder = folder_of(config)
    if _readable(config) is not None and RunFolder(folder).checkpoint.exists():
        return config_of_run(folder)
    if _has_ended(folder):
        number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))
    elif folder.exists():
        shutil.rmtree(folder)
    return config


def _has_ended(folder: Path) -> bool:
    try:
        return load_run(folder).finished
    except FedsieveError:
        return False


def _readable(config: RunConfig) -> RunSummary | None:
    """Return what the folder holds of this very run, if anything."""
    try:
        RunFolder.resume(config)  # refuses another config
        return load_run(folder_of(config))
    except FedsieveError:
        return None


def carried_out(config: RunConfig, progress: Callable[[float], None]) -> RunSummary:
    """Return the summary of a run that is done, goes on or starts, all of its sites in this process."""

    def follow(event: Event) -> None:
        if event["event"] == "round":
            progress(event["round"] / config.rounds)

    folder = folder_of(config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        summary = finished(config)
        if summary is None:
            try:
                simulate(config_to_start(config), Engine(in_process=True), (follow,))
            except NothingLearned:  # to go on from here would be to fail again
                RunFolder(folder).checkpoint.unlink()
                raise
            summary = load_run(folder)
    return summary


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait for whoever else is at this run: a worker may outlive a runner that was killed by a moment."""
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def work_of(config: RunConfig) -> float:
    """Return what a run's time grows with: the records that its sites look at, over those of the data set."""
    return config.rounds * config.steps_per_round * config.sampling_rate * config.cohort_rate


class Clock:
    """Says how long the missing pieces of work will take, from what others took.

    ``missing`` maps names to amounts of work, ``earlier`` has (work, seconds) of what was done before, ``workers`` is
    how many pieces are under way at a time.
    """

    def __init__(
        self, missing: Mapping[str, float], earlier: Sequence[tuple[float, float]] = (), workers: int = 1
    ) -> None:
        self._missing = dict(missing)
        self._work = sum(work for work, _ in earlier)
        self._seconds = sum(seconds for _, seconds in earlier)
        self._workers = workers
        self._running: dict[str, tuple[float, float]] = {}  # when it began, and the share that is done

    def start(self, name: str) -> None:
        """Take note that a piece begins."""
        self._running[name] = time.monotonic(), 0.0

    def advance(self, name: str, share: float) -> None:
        """Take note of how much of a piece is done."""
        self._running[name] = self._running[name][0], share

    def end(self, name: str) -> float:
        """Take note that a piece ended; returns its seconds."""
        seconds = time.monotonic() - self._running.pop(name)[0]
        self._work += self._missing.pop(name)
        self._seconds += seconds
        return seconds

    def left(self) -> float | None:
        """Return the seconds until the last piece ends; None: no idea yet."""
        now = time.monotonic()
        begun = {name: (now - since, share * self._missing[name]) for name, (since, share) in self._running.items()}
        work = self._work + sum(done for _, done in begun.values())
        if not work:
            return None
        # A piece of which nothing is done yet tells nothing of the speed.
        seconds = self._seconds + sum(seconds for seconds, done in begun.values() if done)
        rest = sum(self._missing.values()) - sum(done for _, done in begun.values())
        return rest * seconds / work / max(1, min(self._workers, len(self._missing)))


class Display:
    """What a person sees meanwhile: a bar on a terminal, lines elsewhere."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        self._console = console
        self._total, self._done = total, done
        self._shares: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("[bold]run"),
            MofNCompleteColumn(),
            BarColumn(bar_width=8),  # with its texts it fits 80 columns
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            TextColumn("{task.fields[left]}", style="dim", table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting ...", total=total, completed=done, left="")

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, name: str, left: float | None) -> None:
        """Name what begins."""
        self._shares[name] = 0.0
        self._show(left)
        if not self._console.is_terminal:
            number = self._done + len(self._shares)
            self._say(f"run {number}/{self._total}: {name}; {_left(left) or 'time left unknown'}")

    def advance(self, name: str, share: float, left: float | None) -> None:
        """Move the bar within what is under way."""
        self._shares[name] = share
        self._show(left)

    def end(self, name: str, result: str) -> None:
        """Say what came of it."""
        self._done += 1
        del self._shares[name]
        self._progress.update(self._task, completed=self._done)
        self._say(f"{name}: {result}")

    def _show(self, left: float | None) -> None:
        done = self._done + sum(self._shares.values())
        self._progress.update(self._task, description=", ".join(self._shares), completed=done, left=_left(left))

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{words.duration(max(1, round(seconds)))} left"


@contextmanager
def ray_kept_up(address: str | None) -> Iterator[None]:
    """Keep Ray up: the cluster of ``address``, or one that is shut down in the end."""
    from simulations.ray_grid import start_ray  # slow to load, and it sets what Ray reads when it is imported

    started = start_ray(address)
    try:
        yield
    finally:
        if started:
            import ray

            ray.shutdown()
