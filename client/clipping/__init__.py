"""The clipping engine: the sum over a batch of masked and clipped per-record gradients.

``ClippedSum`` is the interface; ``per_record`` is the engine that works for every model torch.func can differentiate.
Imports ``common`` and torch. Start at ``per_record``.
"""

from typing import Protocol

from torch import Tensor


class ClippedSum(Protocol):
    """Computes the sum over records i of clip(m * g_i, clip_norm) on the kept coordinates."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the clipped sum of a batch, shape (kept,); an empty batch gives zeros.

        Guarantees: adding or removing one record changes the result by at most ``clip_norm`` in L2 norm, up to
        rounding. A record whose gradient is not finite contributes zero.
        """
        ...
