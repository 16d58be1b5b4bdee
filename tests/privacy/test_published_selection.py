"""Where dp-selection-wide-networks and compressive-laplace promise more than they keep, and that ours does not.

Each test crafts a pair of neighbouring data sets, shows that the published noise gives them away beyond the claim, and
runs ours on the same pair.
"""

import math

import numpy as np
import pytest
from scipy import stats

from client.mechanisms.compressive import release_measurements
from client.selection import second_clip, second_clip_sensitivity
from common.compressive import Measurement
from simulations.seeded import GeneratorRandomness

CLIP, BATCH, SECOND = 15.0, 20, 0.05  # the paper's S1, b and S2
DELTA = 1e-5


def _gaussian_epsilon(noise_multiplier: float) -> float:
    """Return the exact epsilon of one Gaussian release at DELTA (Balle and Wang 2018, Theorem 8)."""

    def delta(epsilon: float) -> float:
        half, normal = 1 / (2 * noise_multiplier), stats.norm.cdf
        shift = epsilon * noise_multiplier
        return float(normal(half - shift) - math.exp(epsilon) * normal(-half - shift))

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    return high


def _proven_epsilon(first: np.ndarray, second: np.ndarray, threshold: float) -> float:
    """Return a lower bound on epsilon, with 99.9 % confidence, from outputs under two neighbouring data sets."""
    hits, misses = int((first > threshold).sum()), int((second > threshold).sum())
    surely = stats.binomtest(hits, first.size).proportion_ci(0.998, "exact").low
    at_most = stats.binomtest(misses, second.size).proportion_ci(0.998, "exact").high
    return math.log(max(surely - DELTA, 1e-300) / at_most)


def test_one_record_moves_the_second_clip_by_twice_its_norm() -> None:
    # One record pulls a coordinate up by half the clip norm; its neighbour has a second one that pulls down by all of
    # it. Both means are far outside the second ball, on opposite sides.
    up, down = np.array([CLIP / 2, 0.0]), np.array([-CLIP, 0.0])
    means = (up / BATCH, (up + down) / BATCH)
    clipped = [second_clip(mean, SECOND) for mean in means]
    moved = float(np.linalg.norm(clipped[0] - clipped[1]))
    published, ours = min(CLIP / BATCH, SECOND), second_clip_sensitivity(CLIP / BATCH, SECOND)
    assert moved == pytest.approx(2 * published)
    assert moved <= ours * (1 + 1e-12)

    claim = _gaussian_epsilon(1.0)
    rng = np.random.default_rng(0)
    proven = {}
    for name, sensitivity in (("published", published), ("ours", ours)):
        outputs = [values[0] + sensitivity * rng.standard_normal(400_000) for values in clipped]
        middle, unit = (clipped[0][0] + clipped[1][0]) / 2, sensitivity
        proven[name] = max(_proven_epsilon(*outputs, middle + step * unit) for step in (1.0, 2.0, 2.5, 3.0))
    assert proven["published"] > claim
    assert proven["ours"] <= claim
    assert proven["ours"] > claim / 2  # ours is not merely drowned in noise: the bound is nearly reached


def test_sqrt_p_is_not_the_sensitivity_of_a_drawn_matrix() -> None:
    measurement = Measurement(seed=0, epoch=0, size=23, rows=4, sparsity=1)
    assert measurement.column_bound() > math.sqrt(measurement.rows)
    psi = measurement.columns().astype(np.float64) * measurement.scale  # (size, rows)
    worst = int(np.abs(psi).sum(1).argmax())
    epsilon, bound = 0.5, 3.0
    # Gradients that are +Xi and -Xi at the column of the largest norm: a record that turns the mean around.
    centre = psi[worst] / 2

    def loss(outputs: np.ndarray, scale: float) -> np.ndarray:
        """The log of the likelihood ratio of two Laplace densities around +centre and -centre, row by row."""
        return (np.abs(outputs + centre) - np.abs(outputs - centre)).sum(1) / scale

    rng = np.random.default_rng(1)
    published = math.sqrt(measurement.rows) / epsilon
    drawn = centre + published * rng.laplace(size=(20_000, measurement.rows))
    assert loss(drawn, published).max() > epsilon * 1.0001

    mean = np.zeros(measurement.size)
    mean[worst] = bound
    randomness = GeneratorRandomness(np.random.default_rng(0), np.random.default_rng(1))
    ours = np.array(
        [
            release_measurements(
                mean, measurement=measurement, epsilon=epsilon, entry_bound=bound, randomness=randomness
            )
            for _ in range(4000)
        ]
    )
    assert np.abs(loss(ours, measurement.noise_scale(epsilon))).max() <= epsilon * (1 + 1e-12)
    # And what was released really has that noise around that centre: 2/3 or 3/2 of it would show.
    noise = ((ours - centre) / measurement.noise_scale(epsilon)).ravel()
    assert stats.kstest(noise, stats.laplace.cdf).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(noise * wrong, stats.laplace.cdf).pvalue < 1e-6


def test_entries_beyond_the_bound_are_clipped_not_assumed_away() -> None:
    measurement = Measurement(seed=3, epoch=0, size=30, rows=12, sparsity=2)

    def released(mean: np.ndarray) -> np.ndarray:
        randomness = GeneratorRandomness(np.random.default_rng(0), np.random.default_rng(5))
        return release_measurements(mean, measurement=measurement, epsilon=1.0, entry_bound=0.5, randomness=randomness)

    mean = np.zeros(30)
    mean[[4, 9]] = [0.5, -0.5]
    at_the_bound = released(mean)
    assert np.array_equal(released(1000 * mean), at_the_bound)
    assert not np.array_equal(released(mean / 2), at_the_bound)
    mean[4] = np.nan  # a record whose gradient is no number says nothing there
    assert np.isfinite(released(mean)).all()
    largest = np.abs(measurement.columns()).max() * measurement.scale
    assert np.abs(at_the_bound - released(-mean)).max() <= largest + 1e-12
