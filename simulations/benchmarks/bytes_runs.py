"""Carrying out the runs of the communication benchmark: what is done stays done, what was stopped goes on."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from common.config import RunConfig
from common.errors import FedsieveError
from server.runfolder import RunFolder
from server.runlog import Event
from simulations.benchmarks.bytes_plan import PlannedRun
from simulations.report import words
from simulations.report.summary import RunSummary, load_run
from simulations.run import Engine, config_of_run, simulate


def finished(run: PlannedRun) -> RunSummary | None:
    """Return the summary of a run that has ended and had the config that is wanted now."""
    summary = _readable(run)
    return summary if summary is not None and summary.finished else None


def config_to_start(run: PlannedRun) -> RunConfig:
    """Return the config with which a run that is not done goes on, or starts; what cannot go on is removed."""
    if _readable(run) is not None and RunFolder(run.folder).checkpoint.exists():
        return config_of_run(run.folder)
    if run.folder.exists():
        shutil.rmtree(run.folder)
    return run.config


def _readable(run: PlannedRun) -> RunSummary | None:
    """Return what the folder holds of this very run, if anything."""
    try:
        RunFolder.resume(run.config)  # refuses another config
        return load_run(run.folder)
    except FedsieveError:
        return None


def carry_out(runs: Sequence[PlannedRun], engine: Engine, console: Console) -> None:
    """Do what is not done yet, with a bar on a terminal and with lines elsewhere."""
    found = [(run, finished(run)) for run in runs]
    missing = [run for run, summary in found if summary is None]
    done = [(run, summary) for run, summary in found if summary is not None]
    if done:
        console.print(f"{len(done)} of {len(runs)} runs were done already", highlight=False)
    if not missing:
        return
    clock = Clock(missing, done)
    with _ray(engine), Display(len(runs), len(done), console) as display:
        for run in missing:
            display.start(run, clock.left())

            def follow(event: Event, run: PlannedRun = run) -> None:
                if event["event"] == "round":
                    share = event["round"] / run.config.rounds
                    display.advance(share, clock.left(share))

            began = time.monotonic()
            simulate(config_to_start(run), engine, (follow,))
            display.end(load_run(run.folder), time.monotonic() - began)
            clock.end()


def _work(run: PlannedRun) -> float:
    """Return what a run's time grows with: the records that a site looks at, over its size."""
    return run.config.rounds * run.config.steps_per_round * run.config.sampling_rate


class Clock:
    """Says how long the missing runs will take, from what others took."""

    def __init__(self, missing: Sequence[PlannedRun], done: Sequence[tuple[PlannedRun, RunSummary]]) -> None:
        self._waiting = [_work(run) for run in missing]
        self._work = sum(_work(run) for run, _ in done)
        self._seconds = sum(summary.seconds for _, summary in done)
        self._began = time.monotonic()

    def left(self, share: float = 0.0) -> float | None:
        """Return the seconds until the last run ends, ``share`` of the current one being done; None: no idea yet."""
        running = share * self._waiting[0]
        work = self._work + running
        if not work:
            return None
        seconds = self._seconds + (time.monotonic() - self._began if share else 0.0)
        return (sum(self._waiting) - running) * seconds / work

    def end(self) -> None:
        """Take note that the current run ended and that the next one begins."""
        now = time.monotonic()
        self._seconds += now - self._began
        self._work += self._waiting.pop(0)
        self._began = now


class Display:
    """What a person sees meanwhile."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        self._console = console
        self._total, self._done = total, done
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

    def start(self, run: PlannedRun, left: float | None) -> None:
        """Name the run that begins."""
        self._progress.update(self._task, description=run.config.name, completed=self._done, left=_left(left))
        if not self._console.is_terminal:
            self._say(f"run {self._done + 1}/{self._total}: {run.title}; {_left(left) or 'time left unknown'}")

    def advance(self, share: float, left: float | None) -> None:
        """Move the bar within the run."""
        self._progress.update(self._task, completed=self._done + share, left=_left(left))

    def end(self, summary: RunSummary, seconds: float) -> None:
        """Say what came of the run."""
        self._done += 1
        self._progress.update(self._task, completed=self._done)
        figures = f"accuracy {words.percent(summary.accuracy)}, uplink {words.in_bytes(summary.uplink)}"
        figures += f", downlink {words.in_bytes(summary.downlink)}, {words.duration(seconds)}"
        self._say(f"{summary.name}: {figures}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{words.duration(max(1, round(seconds)))} left"


@contextmanager
def _ray(engine: Engine) -> Iterator[None]:
    """Keep Ray up between runs: a RayGrid shuts down only what it started itself."""
    if engine.in_process:
        yield
        return
    from simulations.ray_grid import start_ray  # slow to load, and it sets what Ray reads when it is imported

    started = start_ray(engine.ray_address)
    try:
        yield
    finally:
        if started:
            import ray

            ray.shutdown()
