"""nn.MultiheadAttention on one sequence: two linear layers and an attention between them; only the latter is redone."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from client.clipping.any_layer import AnyLayerRule
from client.clipping.linear import product_contribution
from client.clipping.rule import Call, Contribution, Masks, merged


class AttentionRule:
    """Self-attention: y = (attention of x in_proj^T) out_proj^T.

    The gradient by the attended values is b out_proj; going back through the attention alone gives the gradient by the
    projections of x. Both projections are then linear layers on sequences. Anything but one call on one sequence for
    query, key and value, without masks, is left to the rule for any layer.
    """

    def __init__(self, layer: nn.MultiheadAttention, masks: Masks) -> None:
        self._layer = layer
        self._masks = masks
        self._otherwise = AnyLayerRule(layer, masks)

    def contribution(self, calls: list[Call]) -> Contribution:
        """Return what the layer adds to the batch; see ``LayerRule``."""
        layer, call = self._layer, calls[0]
        if len(calls) > 1 or not _is_plain(layer, call):
            return self._otherwise.contribution(calls)
        inputs, gradient = call.inputs, call.gradient[0]
        if not layer.batch_first:
            inputs, gradient = inputs.transpose(0, 1), gradient.transpose(0, 1)
        assert layer.in_proj_weight is not None
        with torch.enable_grad():
            projected = F.linear(inputs, layer.in_proj_weight, layer.in_proj_bias).detach().requires_grad_()
            query, key, value = (_by_head(part, layer.num_heads) for part in projected.chunk(3, dim=2))
            attended = F.scaled_dot_product_attention(query, key, value)
            attended = attended.transpose(1, 2).flatten(2)  # (batch, T, width)
        (by_projected,) = torch.autograd.grad(attended, projected, gradient @ layer.out_proj.weight)
        return merged(
            product_contribution(inputs, by_projected, self._masks, "in_proj_weight", "in_proj_bias"),
            product_contribution(attended.detach(), gradient, self._masks, "out_proj.weight", "out_proj.bias"),
        )


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """Return (batch, T, width) as (batch, heads, T, width / heads)."""
    return tensor.view(*tensor.shape[:2], heads, -1).transpose(1, 2)


def _is_plain(layer: nn.MultiheadAttention, call: Call) -> bool:
    """Tell whether this is self-attention with everything trainable and nothing masked."""
    names = (
        "query",
        "key",
        "value",
        "key_padding_mask",
        "need_weights",
        "attn_mask",
        "average_attn_weights",
        "is_causal",
    )
    given = {**dict(zip(names, call.arguments, strict=False)), **call.keywords}
    weights_used = call.gradient[1] is not None
    return (
        layer.in_proj_weight is not None
        and layer.bias_k is None
        and not layer.add_zero_attn
        and given["query"] is given["key"] is given["value"]
        and given.get("key_padding_mask") is None
        and given.get("attn_mask") is None
        and not weights_used
        and all(p.requires_grad for p in layer.parameters())
    )
