"""Recovering a sparse gradient from the sites' measurements."""

import math
from collections.abc import Sequence

import numpy as np

from common.coding import Values
from common.compressive import recover
from common.mask import Indices
from common.methods.compressive import METHOD
from common.plan import RoundPlan
from server.admission import AdmittedUpdate
from server.aggregate import weighted_mean
from server.methods.policy import MethodPolicy


class Policy(MethodPolicy):
    """CoSaMP on the mean of the measurements: all sites measure by one matrix, so that the mean is one of the mean."""

    def combine(
        self, plan: RoundPlan, updates: Sequence[tuple[AdmittedUpdate, float]], model: Values
    ) -> tuple[Indices, Values]:
        """Return the coordinates of the recovered gradient, and the step along it: -learning_rate / sqrt(round).

        Source: compressive-laplace, Algorithms 2 (line 5) and 3, with rho_k = c / sqrt(k).
        """
        measured = weighted_mean([(update.values, weight) for update, weight in updates]).astype(np.float64)
        support, entries = recover(METHOD.measurement(plan), measured)
        gradient = entries * 2 * plan.entry_bound * plan.mask_kept
        step = -plan.learning_rate / math.sqrt(plan.round) * gradient
        return support, step.astype(np.float32)
