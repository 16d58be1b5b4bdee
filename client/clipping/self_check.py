"""Before a model is trusted to the engine: does the engine agree with plain autograd on it?

Layers can do what no rule foresees: use a weight outside its layer, or mix the records of a batch. Either would break
the promise silently, so every model is tried once, on made-up records and parameters: no site's record is used, and no
parameter of a server's choice. A model that cannot be judged is not trained.
"""

import weakref
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from client.clipping.any_layer import learn_arguments
from client.clipping.book_keeping import ClippedSum, squared_norms
from client.clipping.rules import layers_of
from common.errors import ModelError
from common.models import FlatModel, untouched

_TOLERANCE = 1e-3  # relative; single precision in another order of summation stays far below it


class Example(Protocol):
    """Returns made-up records of a site's shape on a device, inputs and targets, with whole numbers below a limit."""

    def __call__(self, count: int, device: torch.device, below: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        ...


_trusted: "weakref.WeakSet[FlatModel]" = weakref.WeakSet()


def require_agreement(model: FlatModel, example: Example) -> None:
    """Raise ModelError unless the engine's sums and norms on a few records are those of plain autograd.

    The engine's sum must be the gradient of the records' summed loss, and the gradient of each, computed alone, must
    have the norm that the engine finds for it among the others; dense and under a mask. Records are made up twice:
    with tokens and classes 0 and 1, and with 0 alone, which every vocabulary has. Parameters too: near the model's own,
    where a branch that begins at zero would hide what it does, and small ones. A pass must leave buffers as they are.
    Edge cases: where a model fails, numbers are not finite, all gradients are zero, or so small that the engine's bound
    on rounding shows, nothing is learnt; a model of which nothing is learnt at all is refused.
    """
    if model in _trusted:
        return
    own = model.vector.clone()
    masks = (None, torch.arange(0, model.size, 2, device=own.device))
    engines = [(kept, ClippedSum(model, kept, 1.0, physical_batch_size=1)) for kept in masks]
    problem, agreed = "", False
    with untouched(model.module), _without_dropout(model.module):
        try:
            for below in (2, 1):
                records, (five, _) = example(3, own.device, below), example(5, own.device, below)
                for made_up in _made_up_parameters(own):
                    model.vector.copy_(made_up)
                    try:
                        _require_untouched_buffers(model, records[0])
                        learn_arguments(
                            model.module, layers_of(model.module), model.laid_out(records[0]), model.laid_out(five)
                        )
                        found = next(filter(None, (_compare(model, *engine, *records) for engine in engines)), "")
                    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError) as error:
                        found = f"it fails on made-up records: {error}"
                    problem, agreed = found or problem, agreed or not found
        finally:
            model.vector.copy_(own)
    if not agreed:
        raise ModelError(
            f"the model cannot be checked before it is trained: {problem}. Clipping protects only records whose "
            "gradients are known to be apart; a model that gives finite, non-zero gradients for a single record can be "
            "checked"
        )
    _trusted.add(model)


def _require_untouched_buffers(model: FlatModel, inputs: Tensor) -> None:
    before = [(name, buffer.clone()) for name, buffer in model.module.named_buffers()]
    with torch.no_grad():
        model.module(model.laid_out(inputs))
    for (name, value), buffer in zip(before, model.module.buffers(), strict=True):
        if not torch.equal(value, buffer):
            raise ModelError(
                f"the model changes its buffer {name!r} in a forward pass: what a record leaves there would reach "
                "later steps past the noise; leave running statistics out"
            )


def _made_up_parameters(own: Tensor) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(own.shape, generator=generator).to(own)
    yield own * (1 + 0.1 * noise) + 0.02 * noise.flip(0)
    yield 0.05 * noise


def _compare(model: FlatModel, kept: Tensor | None, engine: ClippedSum, inputs: Tensor, targets: Tensor) -> str:
    """Raise ModelError where engine and autograd differ; return why nothing can be said, "" where they agree."""
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
        return "made-up records have gradients that are not finite"
    scale = alone.norm(dim=1).sum() + together.norm()
    if not scale > 0:
        return "made-up records have no gradient"
    if (total - together).norm() > _TOLERANCE * scale:
        worst = _worst_parameter(model, total - together, kept)
        raise ModelError(
            f"the gradient by parameter {worst!r} is not the sum of its layer's: the model uses it in a way that "
            "cannot be clipped record by record (outside its layer, or through another parameter); see docs/engine.md"
        )
    if (norms_alone - alone.norm(dim=1)).max() > _TOLERANCE * scale:  # alone there is nothing to mix: it is the bound
        return "the gradients of made-up records are lost to rounding"
    if (norms - alone.norm(dim=1)).abs().max() > _TOLERANCE * scale:
        raise ModelError(
            "a record's gradient depends on the other records of its batch, so that clipping it would protect nobody: "
            "look for a layer that mixes records (batch statistics, a batch that is not the first dimension)"
        )
    return ""


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
