"""Releasing the largest entries of a vector by a few noisy measurements of it."""

import math

import numpy as np

from common.compressive import Measurement, Vector, largest_entries
from common.randomness import RoundRandomness, laplace


def release_measurements(
    mean: Vector, *, measurement: Measurement, epsilon: float, entry_bound: float, randomness: RoundRandomness
) -> Vector:
    """Return noisy measurements of the ``measurement.sparsity`` = kappa largest entries of ``mean``, shape (rows,).

    Computes: v = the kappa largest entries of ``mean``, each clipped to Xi = ``entry_bound``; Psi v / (2 Xi kappa) plus
    Laplace noise of scale max_j ||Psi_j||_1 / epsilon.
    Guarantees: epsilon-DP without delta, for every pair of inputs, so for adding, removing or replacing records alike:
    two such v differ by at most 2 Xi kappa in the L1 norm, their measurements by that times the largest L1 norm of a
    column of this very Psi.
    Edge cases: what is not finite counts as 0.
    Source: compressive-laplace, Algorithm 2, which assumes |entry| <= Xi instead of clipping, and takes sqrt(rows) for
    the norm of the columns.
    """
    if not (0 < epsilon < math.inf and 0 < entry_bound < math.inf):
        raise ValueError(f"expected finite epsilon and entry_bound > 0, got {epsilon} and {entry_bound}")
    finite = np.where(np.isfinite(mean), mean, 0.0)
    chosen = largest_entries(finite, measurement.sparsity)
    entries = np.clip(finite[chosen], -entry_bound, entry_bound)
    exact = measurement.of(chosen, entries / (2 * entry_bound * measurement.sparsity))
    return exact + measurement.noise_scale(epsilon) * laplace(randomness, measurement.rows)
