"""From the communication benchmark's runs to its figures: means over seeds, savings, the headline."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from simulations.benchmarks.bytes_plan import FAMILIES, OURS, REFERENCE, PlannedRun, Setting, System
from simulations.benchmarks.bytes_runs import Point, RunFigures

TOLERANCE = 0.005  # half a point: what counts as the accuracy of dense f32


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Where a system is after a round: means over the seeds; bytes are of all sites and all rounds so far."""

    round: int
    accuracy: float
    uplink: float
    total: float


@dataclass(frozen=True, slots=True)
class SystemResult:
    """A system in a setting: figures of every seed, and the mean curve."""

    system: System
    recipe: str
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    uplinks: tuple[int, ...]
    downlinks: tuple[int, ...]
    resumed: int
    curve: tuple[CurvePoint, ...]

    @property
    def accuracy(self) -> float:
        """Mean final accuracy."""
        return statistics.fmean(self.accuracies)

    @property
    def standard_error(self) -> float | None:
        """Of the mean final accuracy; a single seed has none."""
        count = len(self.accuracies)
        return statistics.stdev(self.accuracies) / math.sqrt(count) if count > 1 else None

    @property
    def uplink(self) -> float:
        """Mean bytes that all sites sent."""
        return statistics.fmean(self.uplinks)

    @property
    def downlink(self) -> float:
        """Mean bytes that all sites were sent."""
        return statistics.fmean(self.downlinks)

    @property
    def total(self) -> float:
        """Mean bytes in both directions."""
        return self.uplink + self.downlink


@dataclass(frozen=True, slots=True)
class SettingResult:
    """The systems of a setting by name."""

    setting: Setting
    systems: dict[str, SystemResult]

    @property
    def reference(self) -> SystemResult | None:
        """Dense float32, where it was run."""
        return self.systems.get(REFERENCE)

    @property
    def comparable(self) -> dict[str, SystemResult]:
        """The systems that were run with the reference's seeds: a mean over fewer may be good by luck."""
        if self.reference is None:
            return self.systems
        seeds = set(self.reference.seeds)
        return {name: system for name, system in self.systems.items() if set(system.seeds) == seeds}

    @property
    def frontiers(self) -> dict[str, list[CurvePoint]]:
        """The frontier of each family that was run: of its comparable systems, if it has any."""
        found = {}
        for family in FAMILIES:
            for systems in (self.comparable, self.systems):
                curves = [one.curve for one in systems.values() if one.system.family == family]
                if curves:
                    found[family] = frontier(curves)
                    break
        return found

    def uplink_saving(self, system: SystemResult) -> float | None:
        """Return how many times fewer bytes go up than with the reference."""
        return None if self.reference is None else self.reference.uplink / system.uplink

    def total_saving(self, system: SystemResult) -> float | None:
        """Return how many times fewer bytes travel in both directions than with the reference."""
        return None if self.reference is None else self.reference.total / system.total

    def gap(self, system: SystemResult) -> float | None:
        """Return how much accuracy is lost against the reference."""
        return None if self.reference is None else self.reference.accuracy - system.accuracy

    def to_reach(self, system: SystemResult) -> CurvePoint | None:
        """Return where the mean curve is first nearly as good as the reference is in the end."""
        if self.reference is None:
            return None
        return first_to_reach(system.curve, self.reference.accuracy - TOLERANCE)


@dataclass(frozen=True, slots=True)
class Headline:
    """The system that the last line speaks of; savings are the smallest over the settings, the gap is the largest."""

    system: str
    partitions: tuple[str, ...]
    qualifies: bool
    uplink_saving: float
    total_saving: float
    accuracy_gap: float

    def __str__(self) -> str:
        points = f"{100 * TOLERANCE:g} points of {REFERENCE} at every epsilon ({' and '.join(self.partitions)})"
        gain = 0 - round(100 * self.accuracy_gap, 2)  # a minus sign alone would make -0.00 of nothing
        verdict = "stays" if self.qualifies else "loses least of the calibrated systems, but none of them stays"
        return (
            f"{self.system} {verdict} within {points}: {self.uplink_saving:.1f}x fewer bytes up, "
            f"{self.total_saving:.1f}x fewer in both directions, accuracy {gain:+.2f} points"
        )


def collect(done: Sequence[tuple[PlannedRun, RunFigures]]) -> list[SettingResult]:
    """Group finished runs by setting and system, in the order in which they were planned."""
    groups: dict[Setting, dict[str, list[tuple[PlannedRun, RunFigures]]]] = {}
    for run, figures in done:
        groups.setdefault(run.setting, {}).setdefault(run.system.name, []).append((run, figures))
    return [
        SettingResult(setting, {name: _system_result(members) for name, members in systems.items()})
        for setting, systems in groups.items()
    ]


def _system_result(members: Sequence[tuple[PlannedRun, RunFigures]]) -> SystemResult:
    runs, figures = zip(*members, strict=True)
    return SystemResult(
        system=runs[0].system,
        recipe=runs[0].recipe,
        seeds=tuple(run.config.seed for run in runs),
        accuracies=tuple(one.accuracy for one in figures),
        uplinks=tuple(one.uplink for one in figures),
        downlinks=tuple(one.downlink for one in figures),
        resumed=sum(one.resumed for one in figures),
        curve=tuple(_mean_point(points) for points in zip(*(one.points for one in figures), strict=True)),
    )


def _mean_point(points: Sequence[Point]) -> CurvePoint:
    uplink = statistics.fmean(one.uplink for one in points)
    total = uplink + statistics.fmean(one.downlink for one in points)
    return CurvePoint(points[0].round, statistics.fmean(one.accuracy for one in points), uplink, total)


def first_to_reach(curve: Sequence[CurvePoint], accuracy: float) -> CurvePoint | None:
    """Return the first point that is as accurate as that; None if there is none."""
    return next((point for point in curve if point.accuracy >= accuracy), None)


def frontier(curves: Sequence[Sequence[CurvePoint]]) -> list[CurvePoint]:
    """Return the points that are more accurate than every point of fewer or as many uplink bytes, cheapest first.

    Between two of them, the best accuracy that a budget buys is that of the cheaper one.
    """
    best: list[CurvePoint] = []
    for point in sorted(
        (point for curve in curves for point in curve), key=lambda point: (point.uplink, -point.accuracy)
    ):
        if not best or point.accuracy > best[-1].accuracy:
            best.append(point)
    return best


def choose_headline(results: Sequence[SettingResult]) -> Headline | None:
    """Return the calibrated sparse system with the largest uplink saving that is as accurate as dense f32 everywhere.

    If none is, the one that loses least; None where nothing can be compared. Only systems that were run with the same
    seeds as dense f32 count, and settings that have any.
    """
    compared = [result for result in results if result.reference is not None and _ours(result)]
    names = [name for name in _ours(compared[0]) if all(name in _ours(one) for one in compared)] if compared else []
    candidates = [_headline(name, compared) for name in names]
    if not candidates:
        return None
    qualified = [candidate for candidate in candidates if candidate.qualifies]
    if qualified:
        return max(qualified, key=lambda candidate: candidate.uplink_saving)
    return min(candidates, key=lambda candidate: candidate.accuracy_gap)


def _ours(result: SettingResult) -> list[str]:
    return [name for name, one in result.comparable.items() if one.system.family == OURS]


def _headline(name: str, compared: Sequence[SettingResult]) -> Headline:
    pairs = [(result.reference, result.systems[name]) for result in compared]
    known = [(reference, system) for reference, system in pairs if reference is not None]
    gap = max(reference.accuracy - system.accuracy for reference, system in known)
    return Headline(
        system=name,
        partitions=tuple(dict.fromkeys(result.setting.partition for result in compared)),
        qualifies=gap <= TOLERANCE + 1e-9,  # accuracies are multiples of 1 / test records: equal means equal
        uplink_saving=min(reference.uplink / system.uplink for reference, system in known),
        total_saving=min(reference.total / system.total for reference, system in known),
        accuracy_gap=gap,
    )


def bar(results: Sequence[SettingResult], headline: Headline | None) -> dict[str, str]:
    """Return the figures of the last line; in points, the best one of comparable systems (iid, epsilon 3)."""
    strict = [result for result in results if result.setting == Setting("iid", 3.0)]
    best = max((system.accuracy for result in strict for system in result.comparable.values()), default=None)
    return {
        "uplink_saving": "none" if headline is None else f"{headline.uplink_saving:.2f}",
        "total_saving": "none" if headline is None else f"{headline.total_saving:.2f}",
        "accuracy_gap": "none" if headline is None else f"{100 * headline.accuracy_gap:.2f}",
        "best_accuracy": "none" if best is None else f"{100 * best:.2f}",
    }
