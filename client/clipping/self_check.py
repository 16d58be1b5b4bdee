"""Before a model is trusted to the engine: does the engine agree with plain autograd on it?

Layers can do what no rule foresees: use a weight outside its layer, or mix the records of a batch. Either would break
the promise silently, so every model is tried once, on made-up records: what comes of it tells nothing of a site's.
"""

import weakref

import torch
from torch import Tensor, nn

from client.clipping.book_keeping import ClippedSum, squared_norms
from common.errors import ModelError
from common.models import FlatModel

_TOLERANCE = 1e-3  # relative; single precision in another order of summation stays far below it

_trusted: "weakref.WeakSet[FlatModel]" = weakref.WeakSet()


def require_agreement(
    model: FlatModel, engine: ClippedSum, inputs: Tensor, targets: Tensor, kept: Tensor | None
) -> None:
    """Raise ModelError unless the engine's sums and norms on a few records are those of plain autograd.

    The engine's sum must be the gradient of the records' summed loss, and the gradient of each, computed alone, must
    have the norm that the engine finds for it among the others. Where any of these is not finite, all are zero, or
    gradients are so small that the engine's bound on rounding shows, nothing can be said: the model is tried again
    when it has other parameters.
    """
    if model in _trusted:
        return
    # What is drawn here must not shift what the round draws: the check happens once per process.
    with torch.random.fork_rng(devices=[]), _without_dropout(model.module):
        everything = slice(None) if kept is None else kept
        one_by_one = list(zip(torch.split(inputs, 1), torch.split(targets, 1), strict=True))
        alone = torch.stack([model.gradient(*record)[everything] for record in one_by_one])  # (records, kept)
        together = model.gradient(inputs, targets)[everything]
        contributions = engine.contributions(inputs, targets)
        total = torch.zeros_like(model.vector)
        engine.add_weighted(total, contributions, torch.ones(len(inputs), dtype=total.dtype, device=total.device))
        total = engine.on_mask(total)
        norms_alone = torch.cat([squared_norms(engine.contributions(*record)) for record in one_by_one]).sqrt()
    norms = squared_norms(contributions).sqrt()
    if not all(bool(part.isfinite().all()) for part in (alone, together, total, norms, norms_alone)):
        return
    scale = alone.norm(dim=1).sum() + together.norm()
    if not scale > 0:  # records without gradients show nothing
        return
    if (total - together).norm() > _TOLERANCE * scale:
        worst = _worst_parameter(model, total - together, kept)
        raise ModelError(
            f"the gradient by parameter {worst!r} is not the sum of its layer's: the model uses it in a way that "
            "cannot be clipped record by record (outside its layer, or through another parameter); see docs/engine.md"
        )
    if (norms_alone - alone.norm(dim=1)).max() > _TOLERANCE * scale:  # alone there is nothing to mix: it is the bound
        return
    if (norms - alone.norm(dim=1)).abs().max() > _TOLERANCE * scale:
        raise ModelError(
            "a record's gradient depends on the other records of its batch, so that clipping it would protect nobody: "
            "look for a layer that mixes records (batch statistics, a batch that is not the first dimension)"
        )
    _trusted.add(model)


def _worst_parameter(model: FlatModel, difference: Tensor, kept: Tensor | None) -> str:
    full = model.vector.new_zeros(model.size)
    full[slice(None) if kept is None else kept] = difference
    return max(model.named_views(full).items(), key=lambda item: float(item[1].norm()))[0]


class _without_dropout:  # noqa: N801 - a context manager
    """Make dropout do nothing for a while: what is random cannot be compared."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [m for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        self._attentions = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]

    def __enter__(self) -> None:
        self._rates = [layer.p for layer in self._layers]
        self._attention_rates = [attention.dropout for attention in self._attentions]
        for layer in self._layers:
            layer.p = 0.0
        for attention in self._attentions:
            attention.dropout = 0.0

    def __exit__(self, *_: object) -> None:
        for layer, rate in zip(self._layers, self._rates, strict=True):
            layer.p = rate
        for attention, rate in zip(self._attentions, self._attention_rates, strict=True):
            attention.dropout = rate
