"""Clipped sums through explicit per-record gradients (torch.func)."""

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from common.models import FlatModel, sample_losses


class PerRecordClippedSum:
    """Materialises every record's gradient, ``physical_batch_size`` records at a time."""

    def __init__(self, model: FlatModel, kept: Tensor | None, clip_norm: float, physical_batch_size: int) -> None:
        """Prepare for the coordinates ``kept`` (sorted indices; None where all are kept)."""
        self._model = model
        self._kept = kept
        self._clip_norm = clip_norm
        self._chunk = physical_batch_size

        def loss(parameters: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
            outputs = functional_call(model.module, parameters, (record.unsqueeze(0),))
            return sample_losses(model.module, outputs, target.unsqueeze(0)).sum()

        self._gradients = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the clipped sum of a batch; see ``ClippedSum``."""
        count = self._model.size if self._kept is None else self._kept.numel()
        total = torch.zeros(count, device=self._model.vector.device)
        for chunk, chunk_targets in zip(
            torch.split(inputs, self._chunk), torch.split(targets, self._chunk), strict=True
        ):
            if len(chunk):
                total += self._clipped_sum_of(chunk, chunk_targets)
        return total

    def _clipped_sum_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        parameters = self._model.named_views(self._model.vector)
        by_name = self._gradients(parameters, inputs, targets)
        gradients = torch.cat([g.flatten(1) for g in by_name.values()], dim=1)  # (batch, d)
        if self._kept is not None:
            gradients = gradients.index_select(1, self._kept)  # (batch, kept): the mask goes before the clip
        norms = torch.linalg.vector_norm(gradients, dim=1)  # (batch,)
        finite = norms.isfinite()
        if not finite.all():
            gradients = torch.where(finite[:, None], gradients, 0.0)
        factors = torch.where(finite, self._clip_norm / norms.clamp(min=self._clip_norm), 0.0)  # min(1, C / norm)
        return factors @ gradients
