"""nn.Embedding: a record touches few rows, so its gradient is kept as those rows."""

import torch
from torch import Tensor, nn

from client.clipping.linear import joined
from client.clipping.rule import Call, Contribution, Masks, Totals


class EmbeddingRule:
    """A record's gradient by row v is the sum of the output gradients at the positions where its token is v.

    Repeated tokens of a record are summed before the norm: ||sum||^2, not the sum of ||.||^2.
    """

    def __init__(self, layer: nn.Embedding, masks: Masks) -> None:
        self._layer = layer
        self._mask = masks["weight"]

    def contribution(self, calls: list[Call]) -> Contribution:
        """Return what the layer adds to the batch; see ``LayerRule``."""
        layer = self._layer
        tokens = joined([call.inputs.reshape(len(call.inputs), -1) for call in calls])  # (batch, T)
        width = layer.embedding_dim
        gradients = joined([call.gradient.reshape(len(call.inputs), -1, width) for call in calls])  # (batch, T, width)
        batch, positions, _ = gradients.shape
        if layer.padding_idx is not None:
            gradients = gradients * (tokens != layer.padding_idx).unsqueeze(2)
        # Bring equal tokens of a record together; a run of them is one row of its gradient.
        tokens, order = tokens.sort(dim=1)
        gradients = gradients.gather(1, order.unsqueeze(2).expand(-1, -1, width))
        starts = torch.ones_like(tokens, dtype=torch.bool)
        starts[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
        run = starts.flatten().cumsum(0) - 1  # (batch * T,): which row each position belongs to
        flat = gradients.reshape(-1, width)
        if bool(starts.all()):
            rows, row_tokens = flat, tokens.flatten()
            owners = torch.arange(batch, device=tokens.device).repeat_interleave(positions)
        else:
            first = starts.flatten().nonzero().squeeze(1)
            rows = flat.new_zeros(len(first), width).index_add_(0, run, flat)
            row_tokens, owners = tokens.flatten()[first], first // positions
        squares = rows * rows
        if self._mask is not None:
            squares *= self._mask[row_tokens]
        norms = squares.new_zeros(batch).index_add_(0, owners, squares.sum(1))

        def add_weighted_sum(factors: Tensor, into: Totals) -> None:
            into["weight"].index_add_(0, row_tokens, factors[owners].unsqueeze(1) * rows)

        return Contribution(norms, add_weighted_sum)
