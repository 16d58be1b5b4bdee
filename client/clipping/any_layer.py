"""Any other layer: per-record gradients of that layer alone, through torch.func or a loop."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from client.clipping.explicit import explicit
from client.clipping.rule import Call, Contribution, Masks
from common.errors import ModelError

Gradients = dict[str, Tensor]
_LEARNT: "WeakKeyDictionary[nn.Module, list[list[bool]]]" = WeakKeyDictionary()
"""Of each layer, for each of its calls in a forward pass: which of the tensors that it is given count the records."""


class AnyLayerRule:
    """Recomputes the layer for one record at a time, all records at once where torch.func can.

    A record's gradient is that of sum(output * b), with b the gradient by the output: the chain rule. What torch.func
    has no rule for (recurrent layers, for one) goes through a loop over the records: exact and slow.
    """

    def __init__(self, layer: nn.Module, masks: Masks) -> None:
        self._layer = layer
        self._masks = masks

    def contribution(self, calls: list[Call]) -> Contribution:
        """Return what the layer adds to the batch; see ``LayerRule``."""
        total: Gradients = {}
        for number, call in enumerate(calls):
            found = self._per_record(call, number)
            total = {name: total[name] + g if total else g for name, g in found.items()}
        return explicit(total, self._masks)

    def _per_record(self, call: Call, number: int) -> Gradients:
        parameters = {name: p.detach() for name, p in self._layer.named_parameters() if name in self._masks}
        tensors, rebuild = _split_tensors((call.arguments, call.keywords))
        input_dims = _input_dims(self._layer, number, tensors)
        leaves = pytree.tree_leaves(call.gradient, is_leaf=lambda leaf: leaf is None)
        places = [place for place, leaf in enumerate(leaves) if leaf is not None]
        gradients = [leaves[place] for place in places]
        output_dims = [_output_dim(self._layer, place) for place in places]

        def loss(parameters: Gradients, tensors: list[Tensor], gradients: list[Tensor]) -> Tensor:
            batched = [t if dim is None else t.unsqueeze(dim) for t, dim in zip(tensors, input_dims, strict=True)]
            arguments, keywords = rebuild(batched)
            outputs = pytree.tree_leaves(functional_call(self._layer, parameters, arguments, keywords))
            terms = [
                (outputs[place] * gradient.unsqueeze(dim)).sum()
                for place, gradient, dim in zip(places, gradients, output_dims, strict=True)
            ]
            return torch.stack(terms).sum()

        if isinstance(self._layer, nn.RNNBase):
            return _loop(loss, parameters, tensors, input_dims, gradients, output_dims)
        with sdpa_kernel(SDPBackend.MATH):  # torch.func knows no other attention
            mapped = vmap(grad(loss), in_dims=(None, input_dims, output_dims), randomness="error")
            found: Gradients = mapped(parameters, tensors, gradients)
            return found


def learn_arguments(
    module: nn.Module, layers: Iterable[tuple[str, nn.Module]], three_records: Tensor, five_records: Tensor
) -> None:
    """Learn which tensors each named layer of a module is given count the records, by passing it 3 records and 5.

    What all records share, such as a mask of positions, keeps its shape; it may have as many rows as a batch has
    records, which no single pass could tell.
    Guarantees: a layer that is not called, whose first tensor does not count the records, or that is called differently
    in the two passes, and a tensor that counts the records in another dimension are ModelErrors.
    """
    layers = list(layers)
    three, five = _shapes(module, layers, three_records), _shapes(module, layers, five_records)
    for name, layer in layers:
        if not three[layer]:
            raise ModelError(
                f"layer {name!r} was not called in the forward pass, so its gradient is not known: call the layer "
                "itself (not a function with its weight), or freeze it with requires_grad_(False)"
            )
        if [len(call) for call in three[layer]] != [len(call) for call in five[layer]]:
            raise ModelError(f"layer {name!r} is called otherwise with 5 records than with 3")
        learnt = [
            [_counts(name, layer, *pair) for pair in zip(*calls, strict=True)]
            for calls in zip(three[layer], five[layer], strict=True)
        ]
        for call, shapes in zip(learnt, five[layer], strict=True):
            if call and not call[0]:
                raise ModelError(_elsewhere(name, layer, shapes[0]))
        _LEARNT[layer] = learnt


def _shapes(
    module: nn.Module, layers: list[tuple[str, nn.Module]], inputs: Tensor
) -> dict[nn.Module, list[list[torch.Size]]]:
    """Return the shapes of the tensors that each layer is given in a pass of a batch, call by call."""
    seen: dict[nn.Module, list[list[torch.Size]]] = {layer: [] for _, layer in layers}

    def note(layer: nn.Module, arguments: Any, keywords: Any) -> None:
        seen[layer].append([tensor.shape for tensor in _split_tensors((arguments, keywords))[0]])

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in seen]
    try:
        with torch.no_grad():
            module(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _counts(name: str, layer: nn.Module, three: torch.Size, five: torch.Size) -> bool:
    """Tell whether a tensor of these shapes in batches of 3 and 5 counts the records."""
    dims = [1] if isinstance(layer, nn.RNNBase) else []  # of states
    if three == five:
        return False
    if any(len(three) > dim and (three[dim], five[dim]) == (3, 5) for dim in [batch_dim(layer), *dims]):
        return True
    raise ModelError(_elsewhere(name, layer, five))


def _elsewhere(name: str, layer: nn.Module, shape: torch.Size) -> str:
    return (
        f"layer {name!r} expected an input whose dimension {batch_dim(layer)} is the 5 records of the batch, got "
        f"{tuple(shape)}: keep the records in the first dimension throughout the model"
    )


def _input_dims(layer: nn.Module, number: int, tensors: list[Tensor]) -> list[int | None]:
    """Return which dimension of each tensor of a call counts the records; None where it is the same for all of them."""
    first = batch_dim(layer)
    if isinstance(layer, nn.RNNBase):
        return [first, *[1] * (len(tensors) - 1)]  # states are (layers, batch, width) whatever comes first elsewhere
    if len(tensors) == 1:
        return [first]
    if layer not in _LEARNT:
        raise ModelError(
            f"a {type(layer).__name__} layer is given {len(tensors)} tensors, and it is not known which of them count "
            "the records: have the model checked first (client.clipping.self_check.require_agreement)"
        )
    calls = _LEARNT[layer]
    if number >= len(calls) or len(calls[number]) != len(tensors):
        raise ModelError(f"a {type(layer).__name__} layer is called otherwise than when the model was checked")
    return [first if counts else None for counts in calls[number]]


def _output_dim(layer: nn.Module, place: int) -> int:
    """Return which dimension of an output counts the records."""
    if place == 0:
        return batch_dim(layer)
    return 1 if isinstance(layer, nn.RNNBase) else 0


def batch_dim(layer: nn.Module) -> int:
    """Return the dimension of the records: the first, unless the layer (attention, recurrent) says otherwise."""
    return 0 if getattr(layer, "batch_first", True) else 1


def _loop(
    loss: Callable[[Gradients, list[Tensor], list[Tensor]], Tensor],
    parameters: Gradients,
    tensors: list[Tensor],
    input_dims: list[int | None],
    gradients: list[Tensor],
    output_dims: list[int],
) -> Gradients:
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    rows: list[tuple[Tensor, ...]] = []
    for record in range(gradients[0].shape[output_dims[0]]):
        own = [t if dim is None else t.select(dim, record) for t, dim in zip(tensors, input_dims, strict=True)]
        by_output = [g.select(dim, record) for g, dim in zip(gradients, output_dims, strict=True)]
        with torch.enable_grad():
            value = loss(leaves, own, by_output)
        rows.append(torch.autograd.grad(value, list(leaves.values())))
    return {name: torch.stack(column) for name, column in zip(leaves, zip(*rows, strict=True), strict=True)}


def _split_tensors(tree: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Return the tensors of nested arguments, and a function that puts others in their places."""
    leaves, shape = pytree.tree_flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def rebuild(tensors: list[Tensor]) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return pytree.tree_unflatten(filled, shape)

    return [leaves[place].detach() for place in places], rebuild
