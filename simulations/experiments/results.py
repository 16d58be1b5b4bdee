"""The results of experiments in a SQLite file: one row for each case and seed that was measured."""

import json
import math
import sqlite3
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

from common.config import ConfigValue
from common.errors import RunFolderError
from simulations.experiments.definition import Case, Experiment
from simulations.experiments.measures import Figures

# Number n of the list makes version n + 1 of the file from version n.
_MIGRATIONS: Sequence[Callable[[sqlite3.Connection], object]] = (
    lambda connection: connection.execute(
        "CREATE TABLE result (experiment TEXT NOT NULL, name TEXT NOT NULL, seed INTEGER NOT NULL, "
        "measure TEXT NOT NULL, settings TEXT NOT NULL, figures TEXT NOT NULL, seconds REAL NOT NULL, "
        "finished REAL NOT NULL, version TEXT NOT NULL, PRIMARY KEY (experiment, name, seed)) STRICT"
    ),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over seeds; ``sem`` is the standard error of that mean, which a single seed does not have."""

    mean: float
    sem: float | None
    seeds: int


@dataclass(frozen=True, slots=True)
class Result:
    """What one seed of a case gave, with which settings, when, and with which version of Fedsieve."""

    settings: Mapping[str, ConfigValue]
    figures: Mapping[str, float]
    seconds: float
    finished: float
    version: str


class Results:
    """The file; a path that does not exist yet is an empty one. Without a path nothing is written anywhere.

    What it lacks is looked for in the results ``behind`` it, which are never written to.
    """

    def __init__(self, path: Path | None, behind: "Results | None" = None) -> None:
        self._behind = behind
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        try:
            self._connection = sqlite3.connect(":memory:" if path is None else path)
            self._migrate()
        except sqlite3.DatabaseError as error:
            raise RunFolderError(f"cannot use {path} for results: {error}; move it away and run again") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def _migrate(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > len(_MIGRATIONS):
            raise RunFolderError(
                f"{self._path} has version {version}, this Fedsieve knows {len(_MIGRATIONS)}: use a newer one"
            )
        with self._connection:
            for number, migrate in enumerate(_MIGRATIONS[version:], start=version + 1):
                migrate(self._connection)
                self._connection.execute(f"PRAGMA user_version = {number}")

    def keep(self, experiment: Experiment, case: Case, seed: int, figures: Figures, seconds: float) -> None:
        """Write down what was measured just now, in place of what an older definition gave."""
        settings = experiment.measure.identity(case.settings)
        result = Result(settings, figures, seconds, time.time(), metadata.version("fedsieve"))
        self.put(experiment, case.name, seed, result)

    def put(self, experiment: Experiment, case: str, seed: int, result: Result) -> None:
        """Write a result down, whenever it was measured."""
        settings, figures = (json.dumps(one, sort_keys=True) for one in (result.settings, result.figures))
        row = (experiment.name, case, seed, experiment.measure.name, settings, figures)
        with self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO result VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, result.seconds, result.finished, result.version),
            )

    def find(self, experiment: Experiment, case: Case, seed: int) -> Result | None:
        """Return a result that was measured with the settings of today's definition, if there is one.

        A setting that did not exist then counts as its default, which is made so that it changes nothing.
        """
        own = self._find(experiment, case, seed)
        return self._behind.find(experiment, case, seed) if own is None and self._behind is not None else own

    def _find(self, experiment: Experiment, case: Case, seed: int) -> Result | None:
        row = self._connection.execute(
            "SELECT measure, settings, figures, seconds, finished, version FROM result "
            "WHERE experiment = ? AND name = ? AND seed = ?",
            (experiment.name, case.name, seed),
        ).fetchone()
        if row is None or row[0] != experiment.measure.name:
            return None
        result = Result(json.loads(row[1]), json.loads(row[2]), *row[3:])
        then: dict[str, ConfigValue] = {**experiment.measure.defaults(), **result.settings}
        wanted = experiment.measure.identity(case.settings)
        return None if any(then.get(key) != value for key, value in wanted.items()) else result

    def of(self, experiment: Experiment, case: Case) -> dict[int, Result]:
        """Return the results of a case by seed, in the order of the definition."""
        found = {seed: self.find(experiment, case, seed) for seed in experiment.seeds}
        return {seed: result for seed, result in found.items() if result is not None}

    def any_of(self, experiment: Experiment) -> bool:
        """Tell whether anything of today's definition was measured."""
        return any(self.of(experiment, case) for case in experiment.cases)


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return mean and standard error; None where nothing was measured."""
    if not values:
        return None
    known = len(values) > 1 and all(math.isfinite(value) for value in values)  # a run may have diverged
    sem = statistics.stdev(values) / math.sqrt(len(values)) if known else None
    return Estimate(statistics.fmean(values), sem, len(values))
