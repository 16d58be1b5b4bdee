"""Watching a forward pass: what every layer was given, and the gradient by what it returned."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from client.clipping.any_layer import batch_dim
from client.clipping.rule import Call, LayerRule
from common.errors import ModelError

_NEW_TENSOR = "use the operation that makes a new tensor, such as x = x + y"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is book-kept as a whole."""

    name: str
    prefix: str
    module: nn.Module
    rule: LayerRule


@dataclass(frozen=True, slots=True)
class _Seen:
    """One call of a layer, before the gradient is known."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: list[Tensor]
    rebuild: Callable[[list[Tensor | None]], Any]
    watched: list[tuple[Tensor, int]]  # everything that must not change any more, with its version

    def gradient_from(self, gradients: Iterator[Tensor | None]) -> Any:
        """Return the next gradients in the shape of the output; what the loss does not depend on has zero or None."""
        found = [next(gradients) for _ in self.outputs]
        if len(found) == 1 and found[0] is None:
            found = [torch.zeros_like(self.outputs[0])]
        return self.rebuild(found)


def capture(layers: Sequence[Layer], loss: Callable[[], Tensor], batch: int) -> list[list[Call]]:
    """Compute ``loss()`` and return the calls of each layer with their output gradients.

    The parameters do not require gradients meanwhile, so the backward pass computes those by activations and no other.
    """
    seen: list[list[_Seen]] = [[] for _ in layers]
    hooks = [
        layer.module.register_forward_hook(_recorder(into), with_kwargs=True)
        for layer, into in zip(layers, seen, strict=True)
    ]
    trainable = [p for layer in layers for p in layer.module.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad(), _explained():
            value = loss()
        for layer, calls in zip(layers, seen, strict=True):
            _check(layer, calls, batch)
        outputs = [output for calls in seen for call in calls for output in call.outputs]
        found = torch.autograd.grad(value, outputs, allow_unused=True) if value.requires_grad else [None] * len(outputs)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trainable:
            parameter.requires_grad_(True)
    gradients = iter(found)
    return [[Call(call.arguments, call.keywords, call.gradient_from(gradients)) for call in calls] for calls in seen]


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do about torch's refusal to change the first layer's output in place."""
    try:
        yield
    except RuntimeError as error:
        if "in-place" not in str(error):
            raise
        raise ModelError(f"the model changes a layer's output in place ({error}): {_NEW_TENSOR}") from error


def _recorder(into: list[_Seen]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
    def record(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        leaves, shape = pytree.tree_flatten(output)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        outputs = [leaves[i] for i in places]
        for tensor in outputs:
            if not tensor.requires_grad:  # the first layer: its inputs are data and its parameters stand still
                tensor.requires_grad_()

        def rebuild(gradients: list[Tensor | None]) -> Any:
            filled: list[Any] = [None] * len(leaves)
            for i, gradient in zip(places, gradients, strict=True):
                filled[i] = gradient
            return pytree.tree_unflatten(filled, shape)

        given = [t for t in pytree.tree_leaves((arguments, keywords)) if isinstance(t, Tensor)]
        into.append(_Seen(arguments, keywords, outputs, rebuild, [(t, t._version) for t in (*given, *outputs)]))

    return record


def _check(layer: Layer, calls: list[_Seen], batch: int) -> None:
    """Refuse what the books cannot be kept for, by name."""
    if not calls:
        raise ModelError(
            f"layer {layer.name!r} was not called in the forward pass, so its gradient is not known: call the layer "
            "itself (not a function with its weight), or freeze it with requires_grad_(False)"
        )
    for call in calls:
        if any(tensor._version != version for tensor, version in call.watched):
            raise ModelError(
                f"what layer {layer.name!r} was given or returned is changed in place later on: {_NEW_TENSOR}"
            )
        dim = batch_dim(layer.module)
        first = call.arguments[0] if call.arguments else None
        if not isinstance(first, Tensor) or first.dim() <= dim or first.shape[dim] != batch:
            shape = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
            raise ModelError(
                f"layer {layer.name!r} expected an input whose dimension {dim} is the {batch} records of the batch, "
                f"got {shape}: keep the records in the first dimension throughout the model"
            )
