"""How often each parameter was masked out in a run, beside what independent random masks would do (Figure 12)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from server.checkpoint import Checkpoint
from server.runfolder import RunFolder
from server.runlog import Event
from simulations.report import words
from simulations.report.charts import Chart
from simulations.report.poster import poster
from simulations.report.svg import Axis, Point, Series, in_words, line_chart

Shares = NDArray[np.float64]
_MEASURED, _EXPECTED = "masked_out_", "random_masked_out_"


@dataclass(slots=True)
class FrozenCount:
    """Follows a run and counts in how many rounds each parameter stayed what it was.

    With noise on every kept coordinate, a parameter that did not move by one bit was off the mask. A round is logged
    before its checkpoint is saved: the file then holds the model of the round before.
    """

    folder: Path
    densities: list[float] = field(default_factory=list)
    counts: NDArray[np.int64] | None = None
    _before: NDArray[np.float32] | None = None

    def follow(self, event: Event) -> None:
        """Take note of an event of the run log."""
        if event["event"] == "round":
            self._compare()
            self.densities.append(event["density"])
        elif event["event"] == "end":
            self._compare()

    def _compare(self) -> None:
        model = Checkpoint.load(RunFolder(self.folder).checkpoint).model
        if self._before is None:
            self.counts = np.zeros(model.size, np.int64)
        else:
            assert self.counts is not None, "made with the first model"
            self.counts += model == self._before
        self._before = model


def count_distribution(densities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that a parameter is off the mask 0, 1, ..., n times, for independent random masks.

    Computes: the Poisson binomial distribution with the probabilities 1 - density of the n rounds.
    """
    probabilities = np.ones(1)
    for density in densities:
        probabilities = np.convolve(probabilities, [density, 1 - density])
    return probabilities


def histograms(counts: NDArray[np.int64], densities: NDArray[np.float64]) -> tuple[Shares, Shares]:
    """Return which share of the parameters was off the mask 0, 1, ..., n times, and what random masks would give."""
    expected = count_distribution(densities)
    return np.bincount(counts, minlength=expected.size) / counts.size, expected


def overlap(measured: Shares, expected: Shares) -> float:
    """Return how much of one histogram lies under the other: 1 is all of it."""
    return float(np.minimum(measured, expected).sum())


def as_figures(measured: Shares, expected: Shares) -> dict[str, float]:
    """Return two histograms as figures of an experiment; ``drawing`` reads them back."""
    named = ((_MEASURED, measured), (_EXPECTED, expected))
    return {f"{name}{times}": float(share) for name, shares in named for times, share in enumerate(shares)}


def drawing(by_case: Mapping[str, Sequence[Mapping[str, float]]]) -> str | None:
    """Return the histograms of each case, means over the figures of its seeds, as an SVG file; None without any."""
    series = []
    for colour, (case, seeds) in enumerate(by_case.items(), start=1):
        found = [shares for figures in seeds if (shares := _shares(figures, _MEASURED))]
        if found:
            series.append(Series(case, _points(np.mean(found, axis=0)), colour))
    if not series:
        return None
    expected = next(
        shares for seeds in by_case.values() for figures in seeds if (shares := _shares(figures, _EXPECTED))
    )
    series.append(Series("independent random masks", _points(np.array(expected)), 0))
    axes = (
        Axis("rounds in which a parameter is masked out", "{:g}".format, whole=True),
        Axis("parameters", words.percent),
    )
    title = "How often a parameter is masked out"
    alternative = " ".join([f"{title}.", *(in_words(one, words.percent) for one in series)])
    chart = Chart("Share of the parameters", "", line_chart(alternative, series, *axes), series)
    return poster(title, "Ranked masks beside random ones", [chart])


def _shares(figures: Mapping[str, float], name: str) -> list[float]:
    keys = (f"{name}{times}" for times in range(len(figures)))
    return [figures[key] for key in keys if key in figures]


def _points(shares: Shares) -> list[Point]:
    return [Point(n, float(share), f"{words.percent(share)} {n} times") for n, share in enumerate(shares)]
