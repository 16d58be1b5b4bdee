"""An experiment as a TOML file: a grid of settings, seeds, and what the paper found.

=================  ====================================================================================================
key                meaning
=================  ====================================================================================================
``title``          what is compared
``source``         where it stands in which paper, or ``none``
``measure``        what a case is: ``run`` (a federated run, the default) or another of ``measures.MEASURES``
``metrics``        figures to show (``metrics.METRICS``); the first is compared with the paper's
``seeds``          every case is measured once for each
``minutes``        CPU-minutes of one case with one seed, roughly: for the time left and for ``list``
``notes``          what a reader must know to judge the figures (optional)
``rows``           an axis: tables in the docs have a row for each of its labels and a column for each combination of
                   the other axes, one table for each metric (optional; else a row for each case)
``[settings]``     what all cases share: run-config changes where the measure is ``run``
``[grid.AXIS]``    one label for each point of an axis, with the settings that it changes; cases are all combinations,
                   named by their labels: ``eps3-rs``
``[paper]``        what the paper found, by case: a number, or ``{ value = .., sem = .. }``
``[differences]``  by name: ``{ of = case, minus = case, paper = number }``, seed by seed (optional)
``[chart]``        draws the first metric along the setting ``x``, a line for each combination of the other axes;
                   ``panels`` is an axis whose labels have a chart each (optional, and so is the whole table)
``[quick]``        settings of a glance with ``--quick`` (optional), and ``seeds`` of it
=================  ====================================================================================================
"""

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import ConfigValue
from common.errors import ConfigError
from simulations.experiments.measures import MEASURES, Measure
from simulations.experiments.metrics import METRICS

FOLDER = Path(__file__).parent
_KEYS = {"title", "source", "measure", "metrics", "seeds", "minutes", "notes", "rows"}
_TABLES = {"settings", "grid", "paper", "differences", "chart", "quick"}
_LABEL = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")

Settings = Mapping[str, ConfigValue]


@dataclass(frozen=True, slots=True)
class PaperValue:
    """A figure of a paper, with its standard error where it gives one."""

    value: float
    sem: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the grid; ``labels`` are its places on the axes, which its name joins."""

    name: str
    labels: Mapping[str, str]
    settings: Settings
    paper: PaperValue | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first metric of a case less that of another, seed by seed."""

    name: str
    of: str
    minus: str
    paper: PaperValue | None


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """What an experiment's figure shows: the setting along ``x``, whose axis is ``axis``, and what has a panel each."""

    x: str
    axis: str
    panels: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A definition, parsed and checked; ``quick`` says that it is the glance."""

    name: str
    path: Path
    title: str
    source: str
    measure: Measure
    metrics: tuple[str, ...]
    seeds: tuple[int, ...]
    minutes: float
    notes: str
    rows: str | None
    cases: tuple[Case, ...]
    differences: tuple[Difference, ...]
    chart: ChartPlan | None = None
    quick: bool = False

    @property
    def total_minutes(self) -> float:
        """CPU-minutes of the whole experiment, roughly."""
        return self.minutes * len(self.cases) * len(self.seeds)


def load(path: Path, *, quick: bool = False) -> Experiment:
    """Read a definition; whatever is wrong with it is a ConfigError that names the file and the key."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the experiment {path}: {error}") from error
    try:
        return _experiment(path, raw, quick)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def shipped() -> list[Path]:
    """Return the definitions that come with Fedsieve."""
    return sorted(FOLDER.glob("*.toml"))


def find(name: str) -> Path:
    """Return the definition of that name, or the file that ``name`` is."""
    if name.endswith(".toml"):
        return Path(name).resolve()
    known = {path.stem: path for path in shipped()}
    if name not in known:
        raise ConfigError(f"unknown experiment {name!r}: expected one of {', '.join(known)}, or a .toml file")
    return known[name]


def _experiment(path: Path, raw: Mapping[str, Any], quick: bool) -> Experiment:
    if unknown := sorted(raw.keys() - _KEYS - _TABLES):
        raise ConfigError(f"unknown key {unknown[0]!r}: expected {', '.join(sorted(_KEYS | _TABLES))}")
    measure_name = _typed(raw, "measure", str, "run")
    if measure_name not in MEASURES:
        raise ConfigError(f"expected 'measure' to be one of {', '.join(MEASURES)}, got {measure_name!r}")
    measure = MEASURES[measure_name]
    glance = dict(_table(raw, "quick")) if quick else {}
    seeds = _seeds({"seeds": glance.pop("seeds")} if "seeds" in glance else raw)
    metrics = tuple(_typed(raw, "metrics", list))
    if not metrics or any(metric not in METRICS for metric in metrics):
        raise ConfigError(f"expected 'metrics' to be some of {', '.join(METRICS)}, got {list(metrics)}")
    papers = {name: _paper(name, value) for name, value in _table(raw, "paper").items()}
    cases = _cases(_table(raw, "settings"), _table(raw, "grid"), glance, papers, measure)
    names = {case.name for case in cases}
    if lost := sorted(papers.keys() - names):
        raise ConfigError(f"[paper] has a value for {lost[0]!r}, but the cases are {', '.join(sorted(names))}")
    differences = tuple(_difference(name, one, names) for name, one in _table(raw, "differences").items())
    if clash := sorted(names & {difference.name for difference in differences}):
        raise ConfigError(f"[differences] has {clash[0]!r}, which is a case: choose another name")
    rows = _rows(raw, papers) if "rows" in raw else None
    minutes = _typed(raw, "minutes", float)
    if not minutes > 0:
        raise ConfigError(f"expected 'minutes' above 0, got {minutes}")
    return Experiment(
        name=path.stem,
        path=path,
        title=_typed(raw, "title", str),
        source=_typed(raw, "source", str),
        measure=measure,
        metrics=metrics,
        seeds=seeds,
        minutes=minutes,
        notes=_typed(raw, "notes", str, "").strip(),
        rows=rows,
        cases=cases,
        differences=differences,
        chart=_chart(_table(raw, "chart"), _table(raw, "grid"), _table(raw, "quick")) if "chart" in raw else None,
        quick=quick,
    )


def _cases(
    shared: Settings,
    grid: Mapping[str, Any],
    glance: Settings,
    papers: Mapping[str, PaperValue],
    measure: Measure,
) -> tuple[Case, ...]:
    axes = [[(name, point) for point in _axis(name, points).items()] for name, points in grid.items()]
    if not axes:
        raise ConfigError("expected at least one [grid.AXIS] with labels, such as [grid.method] with rs = {...}")
    cases = []
    for points in itertools.product(*axes):
        settings = dict(shared)
        for _, (_, changes) in points:
            if clash := sorted(changes.keys() & (settings.keys() - shared.keys())):
                raise ConfigError(f"two axes of the grid set {clash[0]!r}: let one of them do it")
            settings |= changes
        settings |= glance
        labels = {axis: label for axis, (label, _) in points}
        name = "-".join(labels.values())
        try:
            measure.check(settings)
        except ConfigError as error:
            raise ConfigError(f"case {name!r}: {error}") from error
        cases.append(Case(name, labels, settings, papers.get(name)))
    if len({case.name for case in cases}) < len(cases):
        raise ConfigError("two cases have the same name: let the labels of the axes differ")
    return tuple(cases)


def _axis(name: str, points: Any) -> Mapping[str, Settings]:
    if not isinstance(points, dict) or not points or not all(isinstance(one, dict) for one in points.values()):
        raise ConfigError(
            f"expected [grid.{name}] to have labels with settings, such as rs = {{ final-density = 0.3 }}"
        )
    for label in points:
        if not _LABEL.fullmatch(label):
            raise ConfigError(f"expected labels of a-z, 0-9, '.' and '-', 40 at most, got {label!r} in [grid.{name}]")
    return points


def _rows(raw: Mapping[str, Any], papers: Mapping[str, PaperValue]) -> str:
    rows, grid = _typed(raw, "rows", str), _table(raw, "grid")
    if rows not in grid or len(grid) < 2:
        raise ConfigError(f"expected 'rows' to be one of several axes, which are {', '.join(grid)}, got {rows!r}")
    if papers:
        raise ConfigError(
            f"tables with 'rows' = {rows!r} have no place for values of [paper]: leave out one of the two"
        )
    return rows


def _chart(raw: Mapping[str, Any], grid: Mapping[str, Any], glance: Settings) -> ChartPlan:
    if not {"x"} <= raw.keys() <= {"x", "panels"}:
        raise ConfigError(f"expected [chart] with 'x' = a setting, and perhaps 'panels' = an axis, got {dict(raw)}")
    x, panels = _typed(raw, "x", str), _typed(raw, "panels", str) if "panels" in raw else None
    along = [name for name, points in grid.items() if all(_is_number(point.get(x)) for point in points.values())]
    if not along:
        raise ConfigError(f"expected 'x' of [chart] to be a setting to which an axis gives numbers, got {x!r}")
    if x in glance:
        raise ConfigError(f"[quick] sets {x!r}, which is the 'x' of [chart]: all points would be in one place")
    if panels is not None and panels not in grid.keys() - {along[0]}:
        raise ConfigError(f"expected 'panels' of [chart] to be another axis than {along[0]!r}, got {panels!r}")
    return ChartPlan(x, along[0], panels)


def _difference(name: str, raw: Any, cases: set[str]) -> Difference:
    if not isinstance(raw, dict) or not {"of", "minus"} <= raw.keys() <= {"of", "minus", "paper"}:
        raise ConfigError(
            f"expected [differences] {name!r} = {{ of = case, minus = case, paper = number }}, got {raw!r}"
        )
    for key in ("of", "minus"):
        if raw[key] not in cases:
            raise ConfigError(
                f"[differences] {name!r} speaks of {raw[key]!r}, but the cases are {', '.join(sorted(cases))}"
            )
    return Difference(name, raw["of"], raw["minus"], _paper(name, raw["paper"]) if "paper" in raw else None)


def _paper(name: str, raw: Any) -> PaperValue:
    parts = raw if isinstance(raw, dict) else {"value": raw}
    if not {"value"} <= parts.keys() <= {"value", "sem"} or not all(_is_number(part) for part in parts.values()):
        raise ConfigError(f"expected a number or {{ value = .., sem = .. }} as the paper's {name!r}, got {raw!r}")
    return PaperValue(**{key: float(part) for key, part in parts.items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seeds(raw: Mapping[str, Any]) -> tuple[int, ...]:
    seeds: Sequence[Any] = _typed(raw, "seeds", list)
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ConfigError(f"expected 'seeds' to be different whole numbers, got {seeds}")
    return tuple(seeds)


def _table(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"expected a table [{key}], got {value!r}")
    return value


def _typed(raw: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = raw.get(key, default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"expected {key!r} of type {kind.__name__}, got {value!r}")
    return value
