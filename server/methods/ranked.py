"""Ranked sparsification: masks from what the last epoch released."""

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

from common.coding import Values
from common.config import RunConfig
from common.mask import Indices, MaskSpec, hold
from common.plan import RoundPlan
from server.methods.policy import MethodPolicy


def top(scores: NDArray[np.floating], kept: int) -> Indices:
    """Return the coordinates of the ``kept`` largest scores, sorted; of equal ones the first."""
    return np.sort(np.argsort(-scores, kind="stable")[:kept])


def public_normals(purpose: bytes, seed: int, epoch: int, count: int) -> NDArray[np.float64]:
    """Return draws of N(0, 1) from the public seed: for choices that need no secret, and the same after a restart."""
    name = b"fedsieve/" + purpose + struct.pack("<QQ", seed, epoch)
    key = int.from_bytes(hashlib.sha256(name).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(count)


class Policy(MethodPolicy):
    """Ranks the coordinates by |sum of the mean updates released in the last epoch|.

    Computes, at the end of an epoch: score_j = |sum_j| where j was kept, |N(0, variance)| where it was frozen, with
    ``variance`` that of the noise in the sums; the ``kept`` largest are the next mask.
    Guarantees: post-processing of released updates and public numbers. The mask of an epoch stands in ``state`` from
    its first round on; until then it follows from ``state``, so that a restart finds the same one.
    Edge cases: while nothing was released in an epoch, the next mask is the random one of the seed.
    Source: random-sparsification, Algorithm 4.
    """

    def __init__(self, config: RunConfig, size: int) -> None:
        super().__init__(config, size)
        self.state = {
            "ranked_epoch": np.zeros(1, np.int64),
            "ranked_kept": np.ones(size, np.bool_),  # of that epoch
            "ranked_chosen": np.zeros(1, np.bool_),  # whether they were ranked: else the mask is the seed's
            "ranked_sums": np.zeros(size, np.float64),
            "ranked_variance": np.zeros(1, np.float64),
        }

    def mask(self, round_number: int) -> MaskSpec:
        """Return the mask of a round."""
        seeded, state = super().mask(round_number), self.state
        if state["ranked_epoch"][0] != seeded.epoch:
            self._turn(seeded)
        if seeded.kept == self.size or not state["ranked_chosen"][0]:
            return seeded
        digest = hold(np.flatnonzero(state["ranked_kept"]))
        return MaskSpec(seeded.seed, seeded.epoch, seeded.size, seeded.kept, digest)

    def learn(self, plan: RoundPlan, indices: Indices, update: Values, noise_std: float) -> None:
        """Add a round's mean update to the sums of its epoch."""
        self.state["ranked_sums"][indices] += update
        self.state["ranked_variance"][0] += noise_std**2
        self.state["ranked_kept"][:] = False
        self.state["ranked_kept"][indices] = True

    def _turn(self, seeded: MaskSpec) -> None:
        """Begin the epoch of ``seeded``: rank what the last one released."""
        state = self.state
        variance = state["ranked_variance"][0]
        state["ranked_chosen"] = np.array([variance > 0])
        if variance > 0:
            fresh = np.sqrt(variance) * public_normals(b"ranked", seeded.seed, seeded.epoch, self.size)
            scores = np.abs(np.where(state["ranked_kept"], state["ranked_sums"], fresh))
            state["ranked_kept"] = np.zeros(self.size, np.bool_)
            state["ranked_kept"][top(scores, seeded.kept)] = True
        state["ranked_epoch"] = np.array([seeded.epoch])
        state["ranked_sums"] = np.zeros(self.size, np.float64)
        state["ranked_variance"] = np.zeros(1, np.float64)
