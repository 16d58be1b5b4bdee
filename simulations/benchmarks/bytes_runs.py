"""The runs of the communication benchmark: carrying them out, and what is kept of them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from common.coding import largest_index_bytes
from common.config import ConfigValue, RunConfig
from common.errors import ConfigError, FedsieveError, RunFolderError
from server.runfolder import MAY_CHANGE
from simulations import crew, many_runs
from simulations.benchmarks.bytes_plan import PlannedRun
from simulations.crew import Piece, Progress, Workers
from simulations.many_runs import work_of
from simulations.report import words
from simulations.report.summary import RunSummary
from simulations.run import defaults

PUBLISHED = Path(__file__).with_name("published") / "bytes.jsonl"


class Point(NamedTuple):
    """Where a run is after a round that was evaluated; bytes and values are of all sites and all rounds so far."""

    round: int
    accuracy: float
    uplink: int
    downlink: int
    values: int  # how many values were sent up


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What the benchmark needs to know of a run that has ended; the last point is its end."""

    points: tuple[Point, ...]
    resumed: int
    seconds: float
    version: str

    @classmethod
    def of(cls, summary: RunSummary) -> "RunFigures":
        """Return the figures of a run that was evaluated at its end."""
        points = []
        uplink = downlink = values = 0
        for one in summary.rounds:
            uplink, downlink = uplink + one.uplink.total, downlink + one.downlink.total
            values += one.admitted * one.kept
            if one.accuracy is not None:
                points.append(Point(one.number, one.accuracy, uplink, downlink, values))
        if not points or points[-1].round != summary.rounds[-1].number:
            raise FedsieveError(f"{summary.folder} ended without an accuracy: remove it, and it will be run again")
        return cls(tuple(points), summary.resumed, summary.seconds, summary.version)

    @property
    def accuracy(self) -> float:
        """At the end."""
        return self.points[-1].accuracy

    @property
    def uplink(self) -> int:
        """Bytes that all sites sent."""
        return self.points[-1].uplink

    @property
    def downlink(self) -> int:
        """Bytes that all sites were sent."""
        return self.points[-1].downlink

    def with_indices(self) -> "RunFigures":
        """Return the figures as if every update had named its coordinates, in 4 bytes each."""
        points = (one._replace(uplink=one.uplink + largest_index_bytes("raw", 0, one.values)) for one in self.points)
        return replace(self, points=tuple(points))


class Found:
    """The figures of runs that are done: in their ``folders``, or among published ones."""

    def __init__(self, published: Path | None = None, *, folders: bool = True) -> None:
        self._published = {} if published is None else dict(_read(published))
        self._folders = folders

    def of(self, run: PlannedRun) -> RunFigures | None:
        """Return the figures of a run that has ended and had the config that is wanted now.

        A run that differs from another in nothing but indices that travel too is that one and the bytes of the indices.
        """
        own = self._of(run.config)
        if own is not None or run.without_indices is None:
            return own
        other = self._of(run.without_indices)
        return None if other is None else other.with_indices()

    def _of(self, config: RunConfig) -> RunFigures | None:
        summary = many_runs.finished(config) if self._folders else None
        return self._published.get(_identity(config)) if summary is None else RunFigures.of(summary)


def _identity(config: RunConfig) -> tuple[tuple[str, ConfigValue], ...]:
    """Return all that a result depends on."""
    return tuple((key, value) for key, value in config.to_mapping().items() if key not in MAY_CHANGE)


def _read(path: Path) -> Iterator[tuple[tuple[tuple[str, ConfigValue], ...], RunFigures]]:
    """Yield what was published.

    A key that did not exist then counts as its default; a run with a key that is gone now is no run of today.
    """
    if not path.exists():
        return
    known = defaults()
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            raw: dict[str, Any] = json.loads(line)
            points = tuple(Point(int(r), float(a), int(u), int(d), int(v)) for r, a, u, d, v in raw["points"])
            figures = RunFigures(points, int(raw["resumed"]), float(raw["seconds"]), str(raw["version"]))
            if not points:
                raise ValueError("a run without points")
            try:
                config = RunConfig.parse({**known, **raw["config"]})
            except ConfigError:
                continue
            yield _identity(config), figures
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{path} is not a file of published runs ({type(error).__name__}: {error}): restore it with git"
        ) from error


def publish(runs: Sequence[PlannedRun], found: Found, path: Path = PUBLISHED) -> int:
    """Write down the figures of all trainings that are done, a line each; returns how many there are."""
    lines = []
    for run in runs:
        figures = None if run.without_indices is not None else found.of(run)
        if figures is not None:
            config = {key: value for key, value in run.config.to_mapping().items() if key not in MAY_CHANGE}
            facts = {"resumed": figures.resumed, "seconds": round(figures.seconds), "version": figures.version}
            lines.append(json.dumps({"run": run.title, "config": config, "points": figures.points, **facts}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)


def carry_out(runs: Sequence[PlannedRun], found: Found, workers: Workers, console: Console) -> list[str]:
    """Do what is not done yet; a training that fails does not stop the others. Returns what failed, and why."""
    names = {run.config.name for run in runs}
    trained = [run for run in runs if run.without_indices is None or run.without_indices.name not in names]
    results = [(run, found.of(run)) for run in trained]
    earlier = [(work_of(run.config), figures.seconds) for run, figures in results if figures is not None]
    missing = [run for run, figures in results if figures is None]
    pieces = [Piece(run.config.name, work_of(run.config), _train, (run.config,)) for run in missing]
    return crew.carry_out(pieces, earlier, workers, console, _in_words, noun="trainings")


def _train(config: RunConfig, progress: Progress) -> RunFigures:
    return RunFigures.of(many_runs.carried_out(config, progress))


def _in_words(name: str, figures: RunFigures, seconds: float) -> str:
    sent = f"uplink {words.in_bytes(figures.uplink)}, downlink {words.in_bytes(figures.downlink)}"
    return f"accuracy {words.percent(figures.accuracy)}, {sent}, {words.duration(seconds)}"
