"""Rules for parameters whose per-record gradients are small enough to write down: biases and normalisation layers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from client.clipping.rule import Call, Contribution, Masks, Totals, squared_norms_of


def explicit(gradients: dict[str, Tensor], masks: Masks) -> Contribution:
    """Return the contribution of per-record gradients (batch, *parameter shape), by parameter name."""
    norms = torch.stack([squared_norms_of(gradient, masks[name]) for name, gradient in gradients.items()]).sum(0)

    def add_weighted_sum(factors: Tensor, into: Totals) -> None:
        for name, gradient in gradients.items():
            into[name].view(-1).addmv_(gradient.reshape(len(gradient), -1).T, factors)

    return Contribution(norms, add_weighted_sum)


class NormalisationRule:
    """LayerNorm, GroupNorm and InstanceNorm: y = weight * x_hat + bias, where x_hat never mixes records.

    Computes: d/d weight = sum over positions of b * x_hat, d/d bias = sum over positions of b; x_hat is the layer's own
    function without its affine part.
    """

    def __init__(self, layer: nn.Module, masks: Masks) -> None:
        self._masks = masks
        self._normalise, self._positions = _normaliser(layer)

    def contribution(self, calls: list[Call]) -> Contribution:
        """Return what the layer adds to the batch; see ``LayerRule``."""
        gradients: dict[str, Tensor] = {}
        for call in calls:
            found = {}
            if "weight" in self._masks:
                found["weight"] = self._positions(call.gradient * self._normalise(call.inputs))
            if "bias" in self._masks:
                found["bias"] = self._positions(call.gradient)
            gradients = {name: gradients[name] + g if gradients else g for name, g in found.items()}
        return explicit(gradients, self._masks)


def _normaliser(layer: nn.Module) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the layer without its affine part, and the sum over the positions that share a parameter."""
    if isinstance(layer, nn.LayerNorm):
        shape, epsilon = layer.normalized_shape, layer.eps
        dims = len(shape)
        return lambda x: F.layer_norm(x, shape, eps=epsilon), lambda g: _sum_middle(g, dims)
    if isinstance(layer, nn.GroupNorm):
        groups, epsilon = layer.num_groups, layer.eps
        return lambda x: F.group_norm(x, groups, eps=epsilon), _sum_after_channels
    assert isinstance(layer, nn.modules.instancenorm._InstanceNorm)
    epsilon = layer.eps
    return lambda x: F.instance_norm(x, eps=epsilon), _sum_after_channels


def _sum_middle(gradient: Tensor, last: int) -> Tensor:
    """Sum (batch, ..., *parameter shape) over what stands between."""
    return gradient.flatten(1, gradient.dim() - last - 1).sum(1) if gradient.dim() - last > 1 else gradient


def _sum_after_channels(gradient: Tensor) -> Tensor:
    """Sum (batch, channels, ...) over what follows the channels."""
    return gradient.flatten(2).sum(2) if gradient.dim() > 2 else gradient
