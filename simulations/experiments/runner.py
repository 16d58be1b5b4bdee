"""The runner: carries out what is missing of experiments, many cases at a time, and writes down every result."""

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from client.memory import keep_freed_memory
from common.errors import FedsieveError, RunFolderError
from simulations.experiments.definition import Case, Experiment
from simulations.experiments.measures import MEASURES, Figures, Progress, Settings
from simulations.experiments.metrics import METRICS
from simulations.experiments.results import Results
from simulations.many_runs import Clock, Display, ray_kept_up
from simulations.report import words

RESULTS = "results.sqlite"


@dataclass(frozen=True, slots=True)
class Task:
    """One case with one seed."""

    experiment: Experiment
    case: Case
    seed: int

    @property
    def name(self) -> str:
        """The task in words, which ``--only`` looks at."""
        return f"{self.experiment.name} {self.case.name} seed {self.seed}"

    def folder(self, out: Path) -> Path:
        """Return where whatever it leaves is kept."""
        return out / self.experiment.name / f"{self.case.name}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Where cases are carried out; changes no result. ``jobs`` at a time, 0: one for each CPU of the Ray cluster."""

    jobs: int = 0
    ray_address: str | None = None
    in_process: bool = False


def tasks_of(experiments: Sequence[Experiment], words: Sequence[str] = ()) -> list[Task]:
    """Return the tasks whose names have all the words.

    All of a seed come before the next seed, so that what was stopped early has something of everything.
    """
    last = max((len(experiment.seeds) for experiment in experiments), default=0)
    tasks = [
        Task(experiment, case, experiment.seeds[number])
        for number in range(last)
        for experiment in experiments
        if number < len(experiment.seeds)
        for case in experiment.cases
    ]
    return [task for task in tasks if all(word.lower() in task.name for word in words)]


def carry_out(tasks: Sequence[Task], out: Path, workers: Workers, console: Console) -> list[str]:
    """Do what is not done yet; a task that fails does not stop the others. Returns what failed, and why."""
    with _only_runner(out), Results(out / RESULTS) as results:
        found = [(task, results.find(task.experiment, task.case, task.seed)) for task in tasks]
        missing = {task.name: task for task, result in found if result is None}
        earlier = [(task.experiment.minutes, result.seconds) for task, result in found if result is not None]
        if earlier:
            console.print(f"{len(earlier)} of {len(tasks)} runs were done already", highlight=False)
        if not missing:
            return []
        crew = _Here(out) if workers.in_process else _OnRay(out, workers)
        failures = []
        with crew:
            clock = Clock({name: task.experiment.minutes for name, task in missing.items()}, earlier, crew.jobs)
            with Display(len(tasks), len(earlier), console) as display:
                watch = _Watch(clock, display)
                for task, figures in crew.results(list(missing.values()), watch):
                    seconds = clock.end(task.name)
                    if isinstance(figures, Exception):
                        failures.append(f"{task.name}: {figures}")
                        display.end(task.name, f"FAILED: {figures}")
                    else:
                        results.keep(task.experiment, task.case, task.seed, figures, figures.get("seconds", seconds))
                        display.end(task.name, f"{_in_words(task.experiment, figures)}, {words.duration(seconds)}")
        return failures


def _in_words(experiment: Experiment, figures: Figures) -> str:
    known = [metric for metric in experiment.metrics if metric in figures]
    return "; ".join(f"{METRICS[metric].heading}: {METRICS[metric].write(figures[metric])}" for metric in known)


@contextmanager
def _only_runner(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                f"another 'fedsieve experiments run' is at work in {out}: wait for it, or choose another --out"
            ) from None
        yield


@dataclass(slots=True)
class _Watch:
    """Tells clock and display what begins and how far it is."""

    clock: Clock
    display: Display

    def start(self, task: Task) -> None:
        self.clock.start(task.name)
        self.display.start(task.name, task.name, self.clock.left())

    def advance(self, name: str, share: float) -> None:
        self.clock.advance(name, share)
        self.display.advance(name, share, self.clock.left())


Outcome = tuple[Task, Figures | Exception]


class _Here:
    """Carries out tasks in this process, one after the other."""

    jobs = 1

    def __init__(self, out: Path) -> None:
        self._out = out

    def __enter__(self) -> "_Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def results(self, tasks: Sequence[Task], watch: _Watch) -> Iterator[Outcome]:
        for task in tasks:
            watch.start(task)

            def progress(share: float, name: str = task.name) -> None:
                watch.advance(name, share)

            try:
                yield task, _measure(*_plain(task, self._out), progress)
            except FedsieveError as error:
                yield task, error


class _OnRay:
    """Carries out tasks on a Ray cluster, one CPU each."""

    def __init__(self, out: Path, workers: Workers) -> None:
        self._out = out
        self._up = ray_kept_up(workers.ray_address)
        self._wanted = workers.jobs
        self.jobs = 0

    def __enter__(self) -> "_OnRay":
        self._up.__enter__()
        import ray

        self.jobs = self._wanted or max(1, int(ray.cluster_resources().get("CPU", 1)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._up.__exit__(*error)

    def results(self, tasks: Sequence[Task], watch: _Watch) -> Iterator[Outcome]:
        import ray

        board = ray.remote(num_cpus=0)(_Board).remote()
        # A FedsieveError is an answer; a worker that dies is tried again, and goes on where it was.
        remote = ray.remote(num_cpus=1, max_retries=2)(_measure_remotely)
        waiting, running = list(tasks), {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                task = waiting.pop(0)
                watch.start(task)
                running[remote.remote(task.name, _plain(task, self._out), board)] = task
            ready, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            for name, share in ray.get(board.take.remote()).items():
                if any(task.name == name for task in running.values()):
                    watch.advance(name, share)
            for reference in ready:
                task = running.pop(reference)
                try:
                    yield task, ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    yield task, error.as_instanceof_cause()
                except ray.exceptions.RayError as error:
                    yield task, error


class _Board:
    """Where workers on Ray write how far they are."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    def put(self, name: str, share: float) -> None:
        self._shares[name] = share

    def take(self) -> dict[str, float]:
        shares, self._shares = self._shares, {}
        return shares


PlainTask = tuple[str, dict[str, Any], int, Path]


def _plain(task: Task, out: Path) -> PlainTask:
    """Return what a worker needs, without functions: it finds the measure by its name."""
    return task.experiment.measure.name, dict(task.case.settings), task.seed, task.folder(out).resolve()


def _measure(measure: str, settings: Settings, seed: int, folder: Path, progress: Progress) -> Figures:
    return MEASURES[measure].carry_out(settings, seed, folder, progress)


def _measure_remotely(name: str, task: PlainTask, board: Any) -> Figures:
    keep_freed_memory()
    said = 0.0

    def progress(share: float) -> None:
        nonlocal said
        if time.monotonic() - said > 0.5:  # rounds may be far shorter than that
            said = time.monotonic()
            board.put.remote(name, share)

    return _measure(*task, progress)
