"""The runner: carries out what is missing of experiments, many cases at a time, and writes down every result."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from common.errors import RunFolderError
from simulations import crew
from simulations.crew import Piece, Progress, Workers
from simulations.experiments.definition import Case, Experiment
from simulations.experiments.measures import MEASURES, Figures, Settings
from simulations.experiments.metrics import METRICS
from simulations.experiments.results import Results
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


def carry_out(tasks: Sequence[Task], out: Path, results: Results, workers: Workers, console: Console) -> list[str]:
    """Do what is not done yet; a task that fails does not stop the others. Returns what failed, and why."""
    with _only_runner(out):
        found = [(task, results.find(task.experiment, task.case, task.seed)) for task in tasks]
        missing = {task.name: task for task, result in found if result is None}
        earlier = [(task.experiment.minutes, result.seconds) for task, result in found if result is not None]

        def keep(name: str, figures: Figures, seconds: float) -> str:
            task = missing[name]
            results.keep(task.experiment, task.case, task.seed, figures, figures.get("seconds", seconds))
            return f"{_in_words(task.experiment, figures)}, {words.duration(seconds)}"

        pieces = [Piece(task.name, task.experiment.minutes, _measure, _plain(task, out)) for task in missing.values()]
        return crew.carry_out(pieces, earlier, workers, console, keep)


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


PlainTask = tuple[str, dict[str, Any], int, Path]


def _plain(task: Task, out: Path) -> PlainTask:
    """Return what a worker needs, without functions: it finds the measure by its name."""
    return task.experiment.measure.name, dict(task.case.settings), task.seed, task.folder(out).resolve()


def _measure(measure: str, settings: Settings, seed: int, folder: Path, progress: Progress) -> Figures:
    return MEASURES[measure].carry_out(settings, seed, folder, progress)
