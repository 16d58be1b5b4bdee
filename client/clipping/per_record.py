"""Whole gradients, record by record: for methods that change a record's gradient before it is clipped."""

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.models import FlatModel, sample_losses

_mappable: "weakref.WeakKeyDictionary[FlatModel, bool]" = weakref.WeakKeyDictionary()
_WRITTEN_ENTRIES = 1 << 24  # of per-record gradients that may be held at once: 64 MiB


def per_record_gradients(
    model: FlatModel, inputs: Tensor, targets: Tensor, physical_batch_size: int
) -> Iterator[Tensor]:
    """Yield the gradients of the records, (chunk, d), chunk by chunk.

    Guarantees: a row depends on its own record alone, whatever the model: it is computed from a batch of one.
    """
    chunk = max(1, min(physical_batch_size, _WRITTEN_ENTRIES // model.size))
    mapped = _maps(model, inputs, targets)
    for some, some_targets in zip(torch.split(inputs, chunk), torch.split(targets, chunk), strict=True):
        if not len(some):
            continue
        if mapped:
            yield _mapped(model, some, some_targets)
        else:
            pairs = zip(torch.split(some, 1), torch.split(some_targets, 1), strict=True)
            yield torch.stack([model.gradient(*record) for record in pairs])


def _maps(model: FlatModel, inputs: Tensor, targets: Tensor) -> bool:
    """Tell whether torch.func has rules for all of the model: tried once, on a made-up record, which tells nothing."""
    if model not in _mappable:
        made_up = inputs.new_zeros((1, *inputs.shape[1:])), targets.new_zeros((1, *targets.shape[1:]))
        try:
            with torch.random.fork_rng(devices=[]):
                _mapped(model, *made_up)
            _mappable[model] = True
        except (RuntimeError, NotImplementedError, ValueError):  # recurrent layers, for one; a loop is exact and slow
            _mappable[model] = False
    return _mappable[model]


def _mapped(model: FlatModel, inputs: Tensor, targets: Tensor) -> Tensor:
    module = model.module
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(module, parameters, (record.unsqueeze(0),))
        return sample_losses(module, outputs, target.unsqueeze(0)).sum()

    with sdpa_kernel(SDPBackend.MATH):  # torch.func knows no other attention
        found = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(parameters, inputs, targets)
    return torch.cat([found[name].reshape(len(inputs), -1) for name in model.shapes], dim=1)  # (batch, d)
