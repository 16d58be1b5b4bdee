"""The engine: one forward and one backward pass, in which every layer keeps its own books."""

import torch
from torch import Tensor

from client.clipping.capture import Layer, capture
from client.clipping.rule import Contribution, Masks
from client.clipping.rules import entries_per_record, layers_of, rule_of
from common.models import FlatModel, sample_losses

_WRITTEN_ENTRIES = 1 << 24  # of per-record gradients that may be held at once: 64 MiB


class ClippedSum:
    """Computes the sum over records i of clip(m * g_i, clip_norm) on the kept coordinates.

    Guarantees: adding or removing one record changes the result by at most ``clip_norm`` in L2 norm, up to rounding.
    A record whose gradient is not finite contributes zero and is counted in ``dropped``, which stays at the site.
    ``physical_batch_size`` bounds how many records are in memory at once and changes nothing else.
    """

    def __init__(self, model: FlatModel, kept: Tensor | None, clip_norm: float, physical_batch_size: int) -> None:
        """Prepare for the coordinates ``kept`` (sorted indices; None where all are kept)."""
        self._model = model
        self._clip_norm = clip_norm
        self._kept = kept
        masks = _by_parameter(model, kept)
        for module in model.module.modules():
            if getattr(module, "inplace", False):  # nn.ReLU and its like: the books need what they would overwrite
                module.inplace = False  # type: ignore[assignment]
        self._layers = []
        written = 0
        for name, module in layers_of(model.module):
            prefix = f"{name}." if name else ""
            names = tuple(n for n, p in module.named_parameters() if p.requires_grad)
            layer_masks: Masks = {n: masks[prefix + n] for n in names}
            self._layers.append(Layer(name, prefix, names, module, rule_of(module, layer_masks)))
            written += entries_per_record(module)
        self._chunk = max(1, min(physical_batch_size, _WRITTEN_ENTRIES // max(1, written)))
        self.dropped = 0

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the clipped sum of a batch, shape (kept,); an empty batch gives zeros."""
        total: Tensor | None = None
        chunks = zip(torch.split(inputs, self._chunk), torch.split(targets, self._chunk), strict=True)
        for chunk, chunk_targets in chunks:
            if len(chunk):
                total = self._add_chunk(total, chunk, chunk_targets)
        return self.on_mask(torch.zeros_like(self._model.vector) if total is None else total)

    def _add_chunk(self, total: Tensor | None, inputs: Tensor, targets: Tensor) -> Tensor | None:
        contributions = self.contributions(inputs, targets)
        norms = squared_norms(contributions).sqrt()
        finite = norms.isfinite()
        if not finite.all():
            self.dropped += int((~finite).sum())
            return self._add_chunk(total, inputs[finite], targets[finite]) if finite.any() else total
        factors = self._clip_norm / norms.clamp(min=self._clip_norm)  # min(1, C / norm), also where the norm is 0
        if total is None:  # not before: the backward pass needs its memory for activations
            total = torch.zeros_like(self._model.vector)
        self.add_weighted(total, contributions, factors)
        return total

    def contributions(self, inputs: Tensor, targets: Tensor) -> list[Contribution]:
        """Return what every layer adds to a batch: the forward pass, the backward pass and the books."""
        module = self._model.module
        inputs = self._model.laid_out(inputs)

        def loss() -> Tensor:
            return sample_losses(module, module(inputs), targets).sum()

        calls = capture(self._layers, loss, len(inputs))
        with torch.no_grad():
            return [
                layer.rule.contribution(c) if c else Contribution(inputs.new_zeros(len(inputs)), lambda *_: None)
                for layer, c in zip(self._layers, calls, strict=True)  # no record may need a layer that others need
            ]

    def add_weighted(self, total: Tensor, contributions: list[Contribution], factors: Tensor) -> None:
        """Add to ``total`` (d,) the sum over records of factor * gradient; off the mask it becomes arbitrary."""
        views = self._model.named_views(total)
        with torch.no_grad():
            for layer, contribution in zip(self._layers, contributions, strict=True):
                into = {name: views[layer.prefix + name] for name in layer.parameters}
                contribution.add_weighted_sum(factors, into)

    def on_mask(self, total: Tensor) -> Tensor:
        """Return the kept coordinates (kept,) of ``total`` (d,)."""
        return total if self._kept is None else total.index_select(0, self._kept)


def squared_norms(contributions: list[Contribution]) -> Tensor:
    """Return the squared norm of every record's masked gradient, over all layers."""
    return torch.stack([contribution.squared_norms for contribution in contributions]).sum(0)


def _by_parameter(model: FlatModel, kept: Tensor | None) -> Masks:
    """Return each parameter's mask; None where all of it is kept."""
    if kept is None:
        return dict.fromkeys(model.shapes)
    # Bytes, not bools: torch turns them into floats six times faster.
    flags = torch.zeros(model.size, dtype=torch.uint8, device=kept.device)
    flags[kept] = 1
    return {name: None if bool(mask.all()) else mask for name, mask in model.named_views(flags).items()}
