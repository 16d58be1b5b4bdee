"""Importance: what the warm-up released ranks the coordinates, once and for all."""

from collections.abc import Sequence

import numpy as np

from common.coding import Values
from common.config import RunConfig
from common.mask import Indices, MaskSpec, hold
from common.methods.importance import restored, standardisation
from common.plan import RoundPlan
from server.admission import AdmittedUpdate
from server.methods.policy import MethodPolicy
from server.methods.ranked import top


class Policy(MethodPolicy):
    """Keeps the coordinates with the largest sum of |mean update| over the warm-up; restores standardised updates.

    Guarantees: scores and masks are post-processing of released updates. All follows from ``state``, so that a restart
    finds the same masks. The masks of later epochs contain those of earlier ones.
    Edge cases: where the whole warm-up was abandoned, masks are random.
    """

    def __init__(self, config: RunConfig, size: int) -> None:
        super().__init__(config, size)
        self.state = {
            "importance_scores": np.zeros(size, np.float64),
            "importance_reference": np.zeros(size, np.float32),
        }

    @property
    def reference(self) -> Values:
        """The first broadcast model, from which the way to the current one is measured."""
        return self.state["importance_reference"]

    def begin(self, model: Values) -> None:
        """Take in the first broadcast model."""
        self.state["importance_reference"] = model.copy()

    def mask(self, round_number: int) -> MaskSpec:
        """Return the mask of a round."""
        seeded, scores = super().mask(round_number), self.state["importance_scores"]
        if seeded.kept == self.size or not scores.any():
            return seeded
        return MaskSpec(seeded.seed, seeded.epoch, seeded.size, seeded.kept, hold(top(scores, seeded.kept)))

    def combine(
        self, plan: RoundPlan, updates: Sequence[tuple[AdmittedUpdate, float]], model: Values
    ) -> tuple[Indices, Values]:
        """Return the mean update, restored where it is standardised."""
        indices, mean = super().combine(plan, updates, model)
        if plan.standardised:
            alpha, spread = standardisation(model, self.reference, plan)
            mean = restored(mean, alpha[indices], spread[indices], plan)
        return indices, mean

    def learn(self, plan: RoundPlan, indices: Indices, update: Values, noise_std: float) -> None:
        """Score a released update of the warm-up."""
        if not plan.standardised:
            self.state["importance_scores"][indices] += np.abs(update)
