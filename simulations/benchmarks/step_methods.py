"""What a method of the step benchmark is, plain SGD, and ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from client.clipping.book_keeping import ClippedSum
from common.models import FlatModel, channels_last
from simulations.benchmarks.step_models import Model, size_of

CHANNELS_LAST, NCHW = "channels last", "NCHW"
_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {CHANNELS_LAST: channels_last, NCHW: lambda inputs: inputs}


@dataclass(frozen=True, slots=True)
class Task:
    """What every method is asked to do in a cell: parameters -= rate * sum of clip(mask * gradient, clip_norm)."""

    model: Model
    mask: Tensor | None  # (d,), bool; None where all is kept
    clip_norm: float
    rate: float
    physical_batch: int = 512  # the default of a run


class Step(Protocol):
    """One method, ready to train."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Take one step: the forward pass, the sum of the gradients, the update of the parameters."""
        ...

    def total(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum by which a step would move the parameters, (d,) in the order of the model's parameters."""
        ...


class Ours:
    """Our engine, and the update of ``client.dpsgd``."""

    def __init__(self, task: Task, layout: str) -> None:
        self._model = FlatModel(task.model.network())
        self._kept = None if task.mask is None else task.mask.nonzero().squeeze(1)
        self._engine = ClippedSum(self._model, self._kept, task.clip_norm, task.physical_batch)
        self._rate = task.rate

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Take one step, as in a round of training."""
        total = self._engine(inputs, targets)
        if self._kept is None:
            self._model.vector.sub_(total, alpha=self._rate)
        else:
            self._model.vector.scatter_add_(0, self._kept, total * -self._rate)

    def total(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the clipped sum, with zeros off the mask."""
        total = self._engine(inputs, targets)
        if self._kept is None:
            return total
        return torch.zeros_like(self._model.vector).index_copy_(0, self._kept, total)


class TorchStep:
    """A method that gives its sums by parameter; a subclass says how."""

    def __init__(self, task: Task, layout: str, network: nn.Module) -> None:
        self.network = network
        self._layout = _LAYOUTS[layout]
        self._rate = task.rate
        self._clip_norm = task.clip_norm
        self.parameters = list(network.parameters())
        self._places = _places(task.model, network)
        self._size = size_of(network)
        # As floats: multiplying by those is at least as fast.
        self._masks = [
            None if task.mask is None else task.mask[place].view(p.shape).float()
            for place, p in zip(self._places, self.parameters, strict=True)
        ]

    def sums(self, inputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        """Return by parameter what ``total`` returns; nothing of it may stay at the network."""
        raise NotImplementedError

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Take one step."""
        sums = self.sums(self._layout(inputs), targets)
        with torch.no_grad():
            for parameter, value in zip(self.parameters, sums, strict=True):
                parameter.sub_(value, alpha=self._rate)

    def total(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sums as one vector."""
        total = torch.empty(self._size)
        for place, value in zip(self._places, self.sums(self._layout(inputs), targets), strict=True):
            total[place] = value.detach().reshape(-1)
        return total

    def mask(self, gradients: Sequence[Tensor]) -> None:
        """Put zeros off the mask into per-record gradients (batch, *shape)."""
        for gradient, mask in zip(gradients, self._masks, strict=True):
            if mask is not None:
                gradient.mul_(mask)

    def clip_and_sum(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the masked and clipped sums of per-record gradients (batch, *shape), in plain torch."""
        self.mask(gradients)
        # On a CPU nothing else computes a norm in one pass over memory.
        by_parameter = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients]
        norms = torch.linalg.vector_norm(torch.stack(by_parameter), dim=0)  # (batch,)
        factors = self._clip_norm / norms.clamp(min=self._clip_norm)
        return [(factors @ g.flatten(1)).view(g.shape[1:]) for g in gradients]


class Plain(TorchStep):
    """SGD that is not private, on all coordinates."""

    def __init__(self, task: Task, layout: str) -> None:
        super().__init__(replace(task, mask=None), layout, task.model.bare_network())

    def sums(self, inputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        """Return the gradient of the summed loss."""
        F.cross_entropy(self.network(inputs), targets, reduction="sum").backward()
        return taken(self.parameters, "grad")


def taken(parameters: Sequence[Any], attribute: str) -> list[Tensor]:
    """Return what backward left at the parameters, and leave nothing there."""
    found = [getattr(parameter, attribute) for parameter in parameters]
    for parameter in parameters:
        setattr(parameter, attribute, None)
    return found


def _places(model: Model, network: nn.Module) -> list[slice]:
    """Return where each parameter of ``network`` stands in the flat vector of the model.

    Linear attention has the three projections apart that are rows of one matrix, one after the other, in torch's.
    """
    places, start = {}, 0
    with torch.device("meta"):
        reference = model.build()
    for name, parameter in reference.named_parameters():
        places[name] = slice(start, start + parameter.numel())
        for third, letter in enumerate("qkv"):
            size = parameter.numel() // 3
            apart = slice(start + third * size, start + (third + 1) * size)
            places[name.replace("in_proj_", f"{letter}linear.")] = apart if "in_proj_" in name else places[name]
        start += parameter.numel()
    return [places[name] for name, _ in network.named_parameters()]
