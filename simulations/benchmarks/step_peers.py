"""The methods of the step benchmark: those that compute our clipped sum another way, and the list of all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulations.benchmarks.step_methods import CHANNELS_LAST, NCHW, Ours, Plain, Step, Task, TorchStep, taken
from simulations.benchmarks.step_models import with_linear_attention


class OpacusPerSample(TorchStep):
    """Opacus' per-sample gradients, masked, and then clipped and summed by its optimizer."""

    def __init__(self, task: Task, layout: str, functorch: bool = False) -> None:
        network = with_linear_attention(task.model.bare_network())
        super().__init__(task, layout, network)
        self._wrapped = GradSampleModule(network, loss_reduction="sum", force_functorch=functorch)
        self._optimizer = DPOptimizer(
            torch.optim.SGD(self.parameters, task.rate),
            noise_multiplier=0.0,
            max_grad_norm=task.clip_norm,
            expected_batch_size=None,
            loss_reduction="sum",
        )

    def sums(self, inputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        """Return the clipped sums."""
        F.cross_entropy(self._wrapped(inputs), targets, reduction="sum").backward()
        self.mask([p.grad_sample for p in self.parameters])
        self._optimizer.clip_and_accumulate()  # what its step does before adding noise and scaling
        sums = [p.summed_grad for p in self.parameters]
        self._optimizer.zero_grad(set_to_none=True)
        return sums


class OpacusGhost(TorchStep):
    """Opacus' ghost clipping: two backward passes. It has no per-sample gradients to mask, so it is always dense."""

    def __init__(self, task: Task, layout: str) -> None:
        network = with_linear_attention(task.model.bare_network())
        super().__init__(replace(task, mask=None), layout, network)
        self._wrapped = GradSampleModuleFastGradientClipping(
            network, loss_reduction="sum", max_grad_norm=task.clip_norm, use_ghost_clipping=True
        )
        optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(self.parameters, task.rate),
            noise_multiplier=0.0,
            max_grad_norm=task.clip_norm,
            expected_batch_size=None,
            loss_reduction="sum",
        )
        self._loss = DPLossFastGradientClipping(
            self._wrapped, optimizer, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum"
        )

    def sums(self, inputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        """Return the clipped sums."""
        self._loss(self._wrapped(inputs), targets).backward()
        return taken(self.parameters, "grad")


class BackPack(TorchStep):
    """BackPACK's BatchGrad, masked, clipped and summed in torch."""

    def __init__(self, task: Task, layout: str) -> None:
        from backpack import backpack, extend
        from backpack.extensions import BatchGrad

        super().__init__(task, layout, extend(with_linear_attention(task.model.bare_network())))
        self._watching: Callable[[], Any] = lambda: backpack(BatchGrad())

    def sums(self, inputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        """Return the clipped sums."""
        with self._watching():
            F.cross_entropy(self.network(inputs), targets, reduction="sum").backward()
        taken(self.parameters, "grad")
        for layer in self.network.modules():  # one that it does not know is left out, with a warning at most
            if any(not hasattr(parameter, "grad_batch") for parameter in layer.parameters(recurse=False)):
                raise NotImplementedError(f"no {type(layer).__name__}")
        return self.clip_and_sum(taken(self.parameters, "grad_batch"))


class Vmap(TorchStep):
    """torch.func's vmap over the gradient of one record's loss; then masked, clipped and summed in torch."""

    def __init__(self, task: Task, layout: str) -> None:
        super().__init__(task, layout, task.model.bare_network())
        self._by_name = {name: p.detach() for name, p in self.network.named_parameters()}

        def loss(parameters: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
            outputs = functional_call(self.network, parameters, (record.unsqueeze(0),))
            return F.cross_entropy(outputs, target.unsqueeze(0))

        self._gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def sums(self, inputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        """Return the clipped sums."""
        with sdpa_kernel(SDPBackend.MATH):  # torch.func knows no other attention
            gradients = self._gradients(self._by_name, inputs, targets)
        return self.clip_and_sum(list(gradients.values()))


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the benchmark.

    ``writes`` tells whether it holds the gradients of all records at once, ``masks`` whether it clips what the mask
    leaves, and ``layouts`` in which memory layouts of pictures it may run: the fastest is taken.
    """

    build: Callable[[Task, str], Step]
    writes: bool = True
    masks: bool = True
    layouts: tuple[str, ...] = (CHANNELS_LAST, NCHW)


PLAIN, PLAIN_NCHW, OURS = "plain SGD", "plain SGD NCHW", "ours"
METHODS = {
    PLAIN: Method(Plain, writes=False, masks=False, layouts=(CHANNELS_LAST,)),
    PLAIN_NCHW: Method(Plain, writes=False, masks=False, layouts=(NCHW,)),
    OURS: Method(Ours, writes=False, layouts=(CHANNELS_LAST,)),
    # Opacus unfolds pictures as if they were contiguous: channels last, it gives wrong gradients without a word.
    "Opacus hooks": Method(OpacusPerSample, layouts=(NCHW,)),
    "Opacus functorch": Method(partial(OpacusPerSample, functorch=True)),
    "Opacus ghost": Method(OpacusGhost, writes=False, masks=False, layouts=(NCHW,)),
    "BackPACK": Method(BackPack),
    "torch vmap": Method(Vmap),
}
PEERS = tuple(name for name in METHODS if name not in (PLAIN, PLAIN_NCHW, OURS))
