"""nn.Linear: masked norms by one matrix product, no per-record gradient."""

import torch
from torch import Tensor, nn

from client.clipping.explicit import explicit
from client.clipping.rule import Call, Contribution, Masks, Totals, merged, squared_norms_of

_KEPT_ENTRIES = 1 << 23  # of a layer's per-record gradients that may be kept: 32 MiB
_BLOCK_ENTRIES = 1 << 18  # of a mask, or of per-record gradients, turned into floats at a time: fits a core's cache


class LinearRule:
    """A record's gradient by the weight is the sum over its T positions of b_t a_t^T.

    T = 1: ||M * (b a^T)||^2 = (b^2)^T M (a^2), and the weighted sum is (factor b)^T a: two matrix products.
    T > 1: if all is kept, ||sum_t b_t a_t^T||^2 = sum_st (b_s . b_t)(a_s . a_t), where that is cheaper than writing the
    gradient down; else it is written down, and kept for the weighted sum unless that would take too much memory.
    Several calls of a layer are more positions.
    """

    def __init__(self, layer: nn.Linear, masks: Masks) -> None:
        self._masks = masks

    def contribution(self, calls: list[Call]) -> Contribution:
        """Return what the layer adds to the batch; see ``LayerRule``."""
        inputs = joined([_positions(call.inputs) for call in calls])  # (batch, T, in)
        gradients = joined([_positions(call.gradient) for call in calls])  # (batch, T, out)
        return product_contribution(inputs, gradients, self._masks, "weight", "bias")


def product_contribution(inputs: Tensor, gradients: Tensor, masks: Masks, weight: str, bias: str) -> Contribution:
    """Return the contribution of y = x weight^T + bias, for x (batch, T, in) and gradients by y (batch, T, out)."""
    parts = []
    if weight in masks:
        parts.append(_weight_contribution(inputs, gradients, masks[weight], weight))
    if bias in masks:
        summed = gradients.sum(1) if gradients.shape[1] > 1 else gradients[:, 0]
        parts.append(explicit({bias: summed}, masks))
    return parts[0] if len(parts) == 1 else merged(*parts)


def _weight_contribution(inputs: Tensor, gradients: Tensor, mask: Tensor | None, name: str) -> Contribution:
    positions, width = gradients.shape[1], inputs.shape[2] * gradients.shape[2]
    if positions == 1:
        norms = _outer_norms(inputs[:, 0], gradients[:, 0], mask)
    elif mask is None and positions * (inputs.shape[2] + gradients.shape[2]) < width:
        norms = ((inputs @ inputs.mT) * (gradients @ gradients.mT)).sum((1, 2))
        norms += _lost_to_rounding(inputs, gradients, cancelling=True)
    elif len(inputs) * width <= _KEPT_ENTRIES:
        return _written_contribution(inputs, gradients, mask, name)
    else:
        norms = _written_norms(inputs, gradients, mask)

    def add_weighted_sum(factors: Tensor, into: Totals) -> None:
        weights = factors[:, None, None]
        if inputs.shape[2] < gradients.shape[2]:  # a weighted copy of the smaller one
            into[name].addmm_(gradients.flatten(0, 1).T, (weights * inputs).flatten(0, 1))
        else:
            into[name].addmm_((weights * gradients).flatten(0, 1).T, inputs.flatten(0, 1))

    return Contribution(norms, add_weighted_sum)


def joined(parts: list[Tensor]) -> Tensor:
    """Return tensors joined along the positions, without a copy where there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _positions(tensor: Tensor) -> Tensor:
    """Return (batch, ..., features) as (batch, T, features)."""
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)


def _outer_norms(inputs: Tensor, gradients: Tensor, mask: Tensor | None) -> Tensor:
    """Return ||M * (b a^T)||^2 of every record, for inputs (batch, in) and gradients (batch, out)."""
    if mask is None:
        lengths = torch.linalg.vector_norm(inputs, dim=1) * torch.linalg.vector_norm(gradients, dim=1)
        squares: Tensor = lengths.square_()
        return squares.add_(_lost_to_rounding(inputs, gradients))
    rows = max(1, _BLOCK_ENTRIES // mask.shape[1])
    seen = torch.zeros_like(inputs)  # (batch, in): b^2 M
    for start in range(0, mask.shape[0], rows):
        # The mask is kept as bytes: as floats it would double the memory of the layer.
        block = slice(start, start + rows)
        seen.addmm_(gradients[:, block].square(), mask[block].to(inputs.dtype))
    norms: Tensor = torch.linalg.vecdot(seen.mul_(inputs), inputs)
    return norms.add_(_lost_to_rounding(inputs, gradients))


def _lost_to_rounding(inputs: Tensor, gradients: Tensor, *, cancelling: bool = False) -> Tensor:
    """Return an upper bound on what a record's squared norm, computed from products, may lack, shape (batch,).

    Computes: 4 tiny * in * out * (1 + ||a||^2 + ||b||^2), plus 4 eps * ||a||^2 ||b||^2 where ``cancelling``; tiny is
    the smallest normal number and eps the spacing of numbers at 1.
    Guarantees: a norm with it is not below the true one, so that the clip holds whatever weights a server sends: the
    square of a small b is lost below tiny, though a large a would have brought it back (first term); products of
    positions that cancel leave their rounding errors behind (second term). Both are far below the norm otherwise.
    """
    numbers = torch.finfo(inputs.dtype)
    squares = [torch.linalg.vector_norm(t.flatten(1), dim=1).square_() for t in (inputs, gradients)]
    lost: Tensor = (1 + squares[0] + squares[1]).mul_(4 * numbers.tiny * inputs.shape[-1] * gradients.shape[-1])
    return lost.add_(squares[0].mul_(squares[1]), alpha=4 * numbers.eps) if cancelling else lost


def _written_contribution(inputs: Tensor, gradients: Tensor, mask: Tensor | None, name: str) -> Contribution:
    """Write every record's gradient down, masked, and use it twice: for the norm and for the weighted sum."""
    batch, _, columns = inputs.shape
    written = inputs.new_empty(batch, gradients.shape[2], columns)
    norms = inputs.new_empty(batch)
    weights = None if mask is None else mask.to(inputs.dtype)
    records = max(1, _BLOCK_ENTRIES // written[0].numel())
    for start in range(0, batch, records):
        chunk = slice(start, start + records)
        torch.bmm(gradients[chunk].mT, inputs[chunk], out=written[chunk])
        if weights is not None:
            written[chunk].mul_(weights)
        norms[chunk] = torch.linalg.vector_norm(written[chunk].flatten(1), dim=1).square_()  # while it is in cache

    def add_weighted_sum(factors: Tensor, into: Totals) -> None:
        into[name].view(-1).addmv_(written.flatten(1).T, factors)

    return Contribution(norms, add_weighted_sum)


def _written_norms(inputs: Tensor, gradients: Tensor, mask: Tensor | None) -> Tensor:
    """Return ||M * sum_t b_t a_t^T||^2 of every record, writing its gradient down a few records at a time."""
    records = max(1, _BLOCK_ENTRIES // (inputs.shape[2] * gradients.shape[2]))
    norms = [
        squared_norms_of(torch.bmm(b.mT, a), mask)
        for a, b in zip(torch.split(inputs, records), torch.split(gradients, records), strict=True)
    ]
    return torch.cat(norms)
