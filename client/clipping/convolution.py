"""nn.Conv1d and nn.Conv2d: per-record weight gradients, written down once and used twice."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from client.clipping.explicit import explicit
from client.clipping.linear import joined
from client.clipping.rule import Call, Contribution, Masks, Totals, merged

_BLOCK_ENTRIES = 1 << 18  # patches unfolded at a time: fits a core's cache


class ConvolutionRule:
    """A record's gradient by the weight is b (out x positions) times its unfolded input (positions x patch).

    The input is unfolded with channels last, where a patch is a view of the padded picture and its copy runs along
    memory; the weight is ordered likewise: (out, kernel, in) instead of torch's (out, in, kernel). Kernels are small,
    so the gradients of all records are kept from the norm to the weighted sum; the engine bounds how many there are.
    """

    def __init__(self, layer: nn.Conv1d | nn.Conv2d, masks: Masks) -> None:
        self._layer = layer
        self._masks = masks
        mask = masks.get("weight")
        ordered = None if mask is None else _as_2d(mask).permute(0, 2, 3, 1).reshape(-1)
        self._ordered_mask = None if ordered is None else ordered.to(layer.weight.dtype)

    def contribution(self, calls: list[Call]) -> Contribution:
        """Return what the layer adds to the batch; see ``LayerRule``."""
        parts = []
        if "weight" in self._masks:
            parts.append(self._weight(calls))
        if "bias" in self._masks:
            positions = tuple(range(2, calls[0].gradient.dim()))
            biases = joined([call.gradient.sum(positions).unsqueeze(1) for call in calls]).sum(1)  # (batch, out)
            parts.append(explicit({"bias": biases}, self._masks))
        return parts[0] if len(parts) == 1 else merged(*parts)

    def _weight(self, calls: list[Call]) -> Contribution:
        patches, gradients = zip(*(self._unfolded(call) for call in calls), strict=True)
        batch, groups, *_, kernel_height, kernel_width, channels = patches[0].shape
        patch = kernel_height * kernel_width * channels
        outputs = gradients[0].shape[3]
        positions = gradients[0].shape[2]
        written = torch.empty(batch, groups * outputs * patch, dtype=gradients[0].dtype, device=gradients[0].device)
        norms = torch.empty(batch, dtype=written.dtype, device=written.device)
        records = max(1, _BLOCK_ENTRIES // (groups * positions * patch))
        for start in range(0, batch, records):
            chunk = slice(start, start + records)
            target = written[chunk].view(-1, outputs, patch)
            for number, (views, b) in enumerate(zip(patches, gradients, strict=True)):
                columns = views[chunk].reshape(-1, b.shape[2], patch)  # (records * groups, positions, patch): copies
                weights = b[chunk].reshape(-1, b.shape[2], outputs).mT  # (records * groups, out, positions)
                if number == 0:
                    torch.bmm(weights, columns, out=target)
                else:
                    target.baddbmm_(weights, columns)
            if self._ordered_mask is not None:
                written[chunk].mul_(self._ordered_mask)
            norms[chunk] = torch.linalg.vector_norm(written[chunk], dim=1).square_()  # one pass, while it is in cache
        shape = (groups * outputs, kernel_height, kernel_width, channels)

        def add_weighted_sum(factors: Tensor, into: Totals) -> None:
            _as_2d(into["weight"]).add_((factors @ written).view(shape).permute(0, 3, 1, 2))

        return Contribution(norms, add_weighted_sum)

    def _unfolded(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return a view of the patches (batch, groups, y, x, kernel y, kernel x, in) and b (batch, groups, yx, out)."""
        layer, groups = self._layer, self._layer.groups
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padding = layer._reversed_padding_repeated_twice
        inputs = F.pad(call.inputs, padding, mode=mode) if any(padding) else call.inputs
        inputs = _as_2d(inputs).permute(0, 2, 3, 1).contiguous()  # (batch, height, width, in)
        gradient = _as_2d(call.gradient).permute(0, 2, 3, 1)  # (batch, y, x, out)
        (step_y, step_x), (spread_y, spread_x) = _pair(layer.stride), _pair(layer.dilation)
        (kernel_y, kernel_x), channels = _pair(layer.kernel_size), inputs.shape[3] // groups
        record, row, column, channel = inputs.stride()
        patches = inputs.as_strided(
            (len(inputs), groups, gradient.shape[1], gradient.shape[2], kernel_y, kernel_x, channels),
            (record, channels * channel, row * step_y, column * step_x, row * spread_y, column * spread_x, channel),
        )
        by_group = gradient.reshape(len(inputs), -1, groups, gradient.shape[3] // groups).transpose(1, 2)
        return patches, by_group


def _as_2d(tensor: Tensor) -> Tensor:
    """Return what belongs to a Conv1d as if it belonged to a Conv2d of height one."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _pair(numbers: tuple[int, ...]) -> tuple[int, int]:
    return (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
