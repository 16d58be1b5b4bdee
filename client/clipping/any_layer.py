"""Any other layer: per-record gradients of that layer alone, through torch.func or a loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from client.clipping.explicit import explicit
from client.clipping.rule import Call, Contribution, Masks

Gradients = dict[str, Tensor]


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
        for call in calls:
            found = self._per_record(call)
            total = {name: total[name] + g if total else g for name, g in found.items()}
        return explicit(total, self._masks)

    def _per_record(self, call: Call) -> Gradients:
        parameters = {name: p.detach() for name, p in self._layer.named_parameters() if name in self._masks}
        tensors, rebuild = _split_tensors((call.arguments, call.keywords))
        input_dims = _input_dims(self._layer, call, tensors)
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


def _input_dims(layer: nn.Module, call: Call, tensors: list[Tensor]) -> list[int | None]:
    """Return which dimension of each argument counts the records; None where it is the same for all of them."""
    first = batch_dim(layer)
    if isinstance(layer, nn.RNNBase):
        return [first, *[1] * (len(tensors) - 1)]  # states are (layers, batch, width) whatever comes first elsewhere
    records = call.inputs.shape[first]
    return [first if t.dim() > first and t.shape[first] == records else None for t in tensors]


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
