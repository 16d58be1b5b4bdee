"""Watching a forward pass: what every layer was given, and the gradient by what it returned."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
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
    parameters: tuple[str, ...]  # the trainable ones, without the prefix
    module: nn.Module
    rule: LayerRule


@dataclass(frozen=True, slots=True)
class _Seen:
    """One call of a layer, before the gradient is known."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    edges: list[GradientEdge]  # where the gradients by the outputs arrive; the outputs themselves need not stay
    shape: torch.Size  # of the first output, and its type
    dtype: torch.dtype
    rebuild: Callable[[list[Tensor | None]], Any]
    watched: list[tuple[Tensor, int]]  # everything that must not change any more, with its version

    def call(self, gradients: Iterator[Tensor | None]) -> Call:
        """Return the call with the next gradients in the shape of the output.

        What the loss does not depend on has zero or None. The arguments let go of the graph that made them.
        """
        found = [next(gradients) for _ in self.edges]
        if len(found) == 1 and found[0] is None:
            found = [torch.zeros(self.shape, dtype=self.dtype, device=_device(self.arguments))]
        if len(self.arguments) == 1 and isinstance(self.arguments[0], Tensor) and not self.keywords:
            return Call((self.arguments[0].detach(),), {}, self.rebuild(found))  # as a rule: no tree to walk
        detached: dict[int, Tensor] = {}

        def detach(leaf: Any) -> Any:  # equal tensors stay one tensor: attention asks whether they are
            return detached.setdefault(id(leaf), leaf.detach()) if isinstance(leaf, Tensor) else leaf

        arguments, keywords = pytree.tree_map(detach, (self.arguments, self.keywords))
        return Call(arguments, keywords, self.rebuild(found))


def _device(tree: Any) -> torch.device:
    return next(leaf.device for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


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
        edges = [edge for calls in seen for call in calls for edge in call.edges]
        found = torch.autograd.grad(value, edges, allow_unused=True) if value.requires_grad else [None] * len(edges)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trainable:
            parameter.requires_grad_(True)
    gradients = iter(found)
    return [[call.call(gradients) for call in calls] for calls in seen]


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
        outputs, rebuild = _outputs(output)
        if not outputs:
            raise ModelError(f"a {type(module).__name__} layer has parameters and returned no floating-point tensor")
        for tensor in outputs:
            if not tensor.requires_grad:  # the first layer: its inputs are data and its parameters stand still
                tensor.requires_grad_()
        leaves = arguments if not keywords and _all_tensors(arguments) else pytree.tree_leaves((arguments, keywords))
        given = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        edges = [get_gradient_edge(tensor) for tensor in outputs]
        into.append(_Seen(arguments, keywords, edges, outputs[0].shape, outputs[0].dtype, rebuild, given))

    return record


def _all_tensors(arguments: tuple[Any, ...]) -> bool:
    return all(isinstance(one, Tensor) for one in arguments)


def _outputs(output: Any) -> tuple[list[Tensor], Callable[[list[Tensor | None]], Any]]:
    """Return the floating-point tensors of a layer's output, and how their gradients take its shape."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return [output], _the_only_one
    leaves, shape = pytree.tree_flatten(output)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    count = len(leaves)

    def rebuild(gradients: list[Tensor | None]) -> Any:
        filled: list[Any] = [None] * count
        for i, gradient in zip(places, gradients, strict=True):
            filled[i] = gradient
        return pytree.tree_unflatten(filled, shape)

    return [leaves[i] for i in places], rebuild


def _the_only_one(gradients: list[Tensor | None]) -> Any:
    return gradients[0]


def _check(layer: Layer, calls: list[_Seen], batch: int) -> None:
    """Refuse what the books cannot be kept for, by name."""
    for call in calls:
        if any(tensor._version != version for tensor, version in call.watched):
            raise ModelError(f"what layer {layer.name!r} was given is changed in place later on: {_NEW_TENSOR}")
        dim = batch_dim(layer.module)
        first = next(iter([*call.arguments, *call.keywords.values()]), None)
        if not isinstance(first, Tensor) or first.dim() <= dim or first.shape[dim] != batch:
            shape = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
            raise ModelError(
                f"layer {layer.name!r} expected an input whose dimension {dim} is the {batch} records of the batch, "
                f"got {shape}: keep the records in the first dimension throughout the model"
            )
