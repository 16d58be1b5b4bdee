"""Coordinates that each site chose for itself."""

from collections.abc import Sequence

from common.coding import Values
from common.mask import Indices
from common.plan import RoundPlan
from server.admission import AdmittedUpdate
from server.methods.policy import MethodPolicy, scattered_mean


class Policy(MethodPolicy):
    """The mean over all sites, a coordinate that a site did not choose being a zero of its own."""

    def combine(
        self, plan: RoundPlan, updates: Sequence[tuple[AdmittedUpdate, float]], model: Values
    ) -> tuple[Indices, Values]:
        """Return every coordinate that any site chose, and the mean there."""
        chosen = [(u.indices, u.values, weight) for u, weight in updates if u.indices is not None]
        return scattered_mean(chosen, self.size)
