"""What a layer's rule must give, and what it is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer in a forward pass, with the gradient of the batch's summed loss by its output.

    ``gradient`` has the shape of the output, or is a tuple of such where the layer returned a tuple; None stands in it
    for an output that the loss does not depend on.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    gradient: Any

    @property
    def inputs(self) -> Tensor:
        """The first argument, which may have come by name: (batch, ...)."""
        inputs: Tensor = next(iter([*self.arguments, *self.keywords.values()]))
        return inputs


Totals = dict[str, Tensor]
"""By name of a parameter, in its shape: where the sum over the batch is gathered."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one layer adds to a batch.

    ``squared_norms`` (batch,) are those of the masked gradient of every record by this layer's parameters;
    ``add_weighted_sum(factors, into)`` adds, for factors (batch,), the sum over records of factor * gradient by each
    trainable parameter to ``into``, by name and in the parameter's shape: no copy of a large layer is made on the way.
    Off the mask what is added is arbitrary: nobody reads it.
    """

    squared_norms: Tensor
    add_weighted_sum: Callable[[Tensor, Totals], None]


class LayerRule(Protocol):
    """How a kind of layer is book-kept. Made once per layer and mask."""

    def contribution(self, calls: list[Call]) -> Contribution:
        """Return what the layer adds to the batch, given all its calls in the forward pass (one, as a rule)."""
        ...


Masks = dict[str, Tensor | None]
"""Of each trainable parameter of a layer: which entries are kept (bytes 0 or 1, its shape); None where all are."""


def squared_norms_of(gradients: Tensor, mask: Tensor | None) -> Tensor:
    """Return the squared norms of explicit per-record gradients (batch, ...) under a mask, if there is one."""
    flat = gradients.reshape(len(gradients), -1)  # (batch, entries)
    if mask is None:
        return (flat * flat).sum(1)
    norms: Tensor = (flat * flat) @ mask.reshape(-1).to(flat.dtype)
    return norms


def merged(first: Contribution, second: Contribution) -> Contribution:
    """Return two contributions of disjoint parameters as one."""

    def add_weighted_sum(factors: Tensor, into: Totals) -> None:
        first.add_weighted_sum(factors, into)
        second.add_weighted_sum(factors, into)

    return Contribution(first.squared_norms + second.squared_norms, add_weighted_sum)
