"""Releasing the largest entries of a gradient by a few noisy measurements of it."""

import math
from collections.abc import Callable

import numpy as np

from client.data import SiteData
from client.dpsgd import PlainSum, seed_modules
from client.mechanisms.upload import Upload
from common.compressive import Measurement, Vector, largest_entries
from common.methods.compressive import METHOD
from common.models import FlatModel
from common.plan import RoundPlan
from common.randomness import RoundRandomness, laplace


def train_round(
    model: FlatModel,
    data: SiteData,
    plan: RoundPlan,
    randomness: RoundRandomness,
    progress: Callable[[int], None],
) -> Upload:
    """Return noisy measurements of the mean gradient of one Poisson batch; the model stays as it is.

    The mean is the sum over the batch divided by the public expected batch. See ``release_measurements``: the guarantee
    needs no clip of a record's gradient, since it holds for any two vectors. An empty batch is measured like any other.
    """
    progress(0)
    device = model.vector.device
    seed_modules(randomness.module_seed(), device)
    batch = data.batch(randomness.poisson_sample(data.size, plan.sampling_rate), device)
    total = PlainSum(model, None, plan)(*batch)
    released = release_measurements(
        total.cpu().numpy().astype(np.float64) / (plan.sampling_rate * data.declared_size),
        measurement=METHOD.measurement(plan),
        epsilon=1 / plan.noise_multiplier,
        entry_bound=plan.entry_bound,
        randomness=randomness,
    )
    return Upload(released.astype(np.float32))


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
