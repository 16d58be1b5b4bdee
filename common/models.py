"""The model zoo, a user's own models, and a module whose parameters are one flat vector."""

import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from common.coding import Values
from common.errors import DatasetError, ModelError


def channels_last(inputs: Tensor) -> Tensor:
    """Return pictures (batch, channels, height, width) with their channels last in memory, which a CPU prefers.

    With one channel both orders are the same bytes; only the strides say which is meant, and torch goes by them.
    """
    if inputs.dim() != 4:
        return inputs
    _, channels, height, width = inputs.shape
    if channels == 1:
        return inputs.contiguous().as_strided(inputs.shape, (height * width, 1, width, 1))
    return inputs.contiguous(memory_format=torch.channels_last)


class _Pictures(nn.Module):
    """Give flat or channel-less pictures the shape and memory layout that convolutions want."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, inputs: Tensor) -> Tensor:
        return channels_last(inputs.reshape(-1, *self.shape))


def dp_cnn_s() -> nn.Module:
    """DP-CNN/S for 28x28x1 and 10 classes: 26,010 parameters (random-sparsification, section 6)."""
    return nn.Sequential(
        _Pictures(1, 28, 28),
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def dp_cnn() -> nn.Module:
    """DP-CNN for 32x32x3 and 10 classes: about 550,000 parameters (random-sparsification, section 6)."""
    layers: list[nn.Module] = [_Pictures(3, 32, 32)]
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh()]
            channels = width
        layers.append(nn.MaxPool2d(2, stride=2))
    layers += [nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.Tanh(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def mlp(widths: str) -> nn.Module:
    """Fully connected network with tanh between its layers, e.g. ``mlp:784-128-10``; ``linear:784-10`` is the same."""
    try:
        sizes = [int(width) for width in widths.split("-")]
    except ValueError:
        raise ModelError(f"expected widths like 784-128-10, got {widths!r}") from None
    if len(sizes) < 2 or min(sizes) < 1:
        raise ModelError(f"expected at least two widths of 1 or more, like 784-10, got {widths!r}")
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def h_cnn_s() -> nn.Module:
    """H-CNN/S for scattering features of 28x28 pictures (81x7x7), 10 classes: 33,066 parameters.

    Source: random-sparsification, section 6; use it with a data set whose name ends in ``+scattering``.
    """
    return nn.Sequential(
        _Pictures(81, 7, 7),
        nn.GroupNorm(27, 81, affine=False),
        nn.Conv2d(81, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


class _LinearRegression(nn.Module):
    """One number per record, w . x + b; the loss is the squared error. Convex."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.linear(inputs.flatten(1)))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square()


class _LogisticRegression(nn.Module):
    """Two classes by one linear score w . x + b; the loss is the logistic one. Convex."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        score = self.linear(inputs.flatten(1))  # (batch, 1)
        return torch.cat([torch.zeros_like(score), score], dim=1)  # cross-entropy of these is the logistic loss


class _Cbow(nn.Module):
    """Word embeddings: the word that comes first in a record is scored against each of the others by a dot product.

    Of those the first is the right one, the rest are negatives: the loss of a record is -log sigmoid(score) of the
    first and -log sigmoid(-score) of the rest.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        embedded = self.embedding(inputs.long())  # (batch, words, width)
        return torch.einsum("bw,bcw->bc", embedded[:, 0], embedded[:, 1:])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        right = F.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, right, reduction="none").sum(1)


def linear_regression(features: str) -> nn.Module:
    """Linear regression on that many features, e.g. ``linear-regression:20``."""
    return _LinearRegression(*_sizes("linear-regression", features, 1))


def logistic_regression(features: str) -> nn.Module:
    """Logistic regression of two classes on that many features, e.g. ``logistic-regression:20``."""
    return _LogisticRegression(*_sizes("logistic-regression", features, 1))


def cbow(sizes: str) -> nn.Module:
    """CBOW with negative sampling, e.g. ``cbow:1000-100``: that many words, each with that many numbers.

    Source: dp-selection-wide-networks, section 6.1; Mikolov et al. (2013).
    """
    return _Cbow(*_sizes("cbow", sizes, 2))


def _sizes(model: str, text: str, count: int) -> list[int]:
    parts = text.split("-")
    if len(parts) != count or not all(part.isdecimal() and int(part) for part in parts):
        example = "-".join(["1000", "100"][:count])
        raise ModelError(f"expected {count} sizes of 1 or more, like {model}:{example}, got {model}:{text}")
    return [int(part) for part in parts]


ZOO: dict[str, Callable[[], nn.Module]] = {"dp-cnn-s": dp_cnn_s, "dp-cnn": dp_cnn, "h-cnn-s": h_cnn_s}
_SIZED_ZOO: dict[str, Callable[[str], nn.Module]] = {
    "linear": mlp,
    "mlp": mlp,
    "linear-regression": linear_regression,
    "logistic-regression": logistic_regression,
    "cbow": cbow,
}
_SIZED_EXAMPLES = ("linear:784-10", "mlp:784-128-10", "linear-regression:20", "logistic-regression:20", "cbow:1000-100")


def build(name: str) -> nn.Module:
    """Return a new module: of the zoo, or from a user's ``package.module:function`` that takes no argument.

    A module may have a method ``loss(outputs, targets) -> (batch,)``; without one the loss is cross-entropy.
    """
    if name in ZOO:
        return ZOO[name]()
    head, colon, tail = name.partition(":")
    if colon and head in _SIZED_ZOO:
        return _SIZED_ZOO[head](tail)
    if not colon:
        known = ", ".join([*ZOO, *_SIZED_EXAMPLES])
        raise ModelError(f"unknown model {name!r}: expected one of {known}, or package.module:function")
    try:
        function = getattr(importlib.import_module(head), tail)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot load model {name!r}: {error}; is its folder on PYTHONPATH?") from error
    try:
        module = function()
    except TypeError as error:
        raise ModelError(f"cannot build model {name!r}: {error}; expected a function without arguments") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"expected {name} to return a torch.nn.Module, got {type(module).__name__}")
    return module


def sample_losses(module: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return one loss per record, shape (batch,)."""
    own: Callable[[Tensor, Tensor], Tensor] | None = getattr(module, "loss", None)
    if own is not None:
        return own(outputs, targets)
    if targets.is_floating_point():
        raise ModelError(
            "the targets are numbers, but the model has no loss for them: use linear-regression:FEATURES, give the "
            "model a method loss(outputs, targets), or save classes as whole numbers"
        )
    return F.cross_entropy(outputs, targets, reduction="none")


def right_answers(outputs: Tensor, targets: Tensor) -> int | None:
    """Return how many records of a batch are classified rightly; None where targets or outputs tell no classes."""
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or targets.dim() != 1 or targets.is_floating_point():
        return None
    return int((outputs.argmax(1) == targets).sum())


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Put buffers and torch's generators back afterwards: what is tried on a module must shift nothing in a round."""
    before = [buffer.clone() for buffer in module.buffers()]
    devices = {tensor.device for tensor in module.parameters() if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for buffer, value in zip(module.buffers(), before, strict=True):
                buffer.copy_(value)


def _made_up() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class FlatModel:
    """A module whose trainable parameters are views of one flat vector, in the order of ``named_parameters``."""

    def __init__(
        self, module: nn.Module, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        module = module.to(device=device, dtype=dtype)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ModelError("the model has no trainable parameter")
        for layer_name, layer in module.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                raise ModelError(
                    f"layer {layer_name!r} is a {type(layer).__name__}, which mixes the records of a batch: no record "
                    "then has a gradient of its own; use torch.nn.GroupNorm instead"
                )
        self.module = module
        self._channels_last: dict[torch.Size, bool] = {}
        self.shapes = {name: p.shape for name, p in named}
        self.vector = torch.empty(sum(p.numel() for _, p in named), dtype=dtype, device=named[0][1].device)
        views = self.named_views(self.vector)
        for name, parameter in named:  # one by one, so that no second copy of the whole model is ever held
            parameter.data = views[name].copy_(parameter.data)

    @classmethod
    def of(cls, name: str, device: torch.device | None = None) -> "FlatModel":
        """Return the model of a name as every site and the server build it: what is frozen is the same everywhere."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return cls(build(name), device)

    @property
    def size(self) -> int:
        """d, the number of trainable parameters."""
        return self.vector.numel()

    def gradient(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient of the summed loss of a batch by the whole vector, shape (d,); not private."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        loss = sample_losses(self.module, self.module(self.laid_out(inputs)), targets).sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def require_fit(self, name: str, inputs: Tensor, targets: NDArray[Any]) -> None:
        """Raise ModelError or DatasetError unless this model, called ``name``, takes such inputs and these targets."""
        try:
            with torch.no_grad():
                outputs = self.module(self.laid_out(inputs))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ModelError(f"{name} does not take records of shape {tuple(inputs.shape[1:])}: {error}") from error
        own_targets = hasattr(self.module, "loss") or targets.dtype.kind == "f"
        if not own_targets and targets.size and not 0 <= targets.min() <= targets.max() < outputs.shape[1]:
            raise DatasetError(
                f"expected classes 0 to {outputs.shape[1] - 1}, which {name} tells apart, got {targets.min()} to "
                f"{targets.max()}: correct the targets"
            )
        count = min(len(inputs), len(targets))
        if not count:
            return
        try:
            with torch.no_grad():
                outputs = self.module(self.laid_out(inputs[:count]))
                losses = sample_losses(self.module, outputs, torch.from_numpy(targets[:count]).to(inputs.device))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ModelError(f"{name} has no loss for targets of shape {targets.shape[1:]}: {error}") from error
        if losses.shape != (count,):
            raise ModelError(
                f"expected one loss for each record from {name}, got shape {tuple(losses.shape)} of {count}"
            )

    def laid_out(self, inputs: Tensor) -> Tensor:
        """Return a batch in the memory layout that suits the model best; its numbers stay the same.

        Pictures have their channels last where two made-up ones pass forward and backward so. Under ``x.view(-1, 400)``
        after a convolution, for one, they do not.
        """
        if inputs.dim() != 4:
            return inputs
        shape = inputs.shape[1:]
        if shape not in self._channels_last:
            made_up = channels_last(torch.rand(2, *shape, generator=_made_up()))
            self._channels_last[shape] = not self._has_shortcuts() and self._passes(made_up)
        return channels_last(inputs) if self._channels_last[shape] else inputs

    def _has_shortcuts(self) -> bool:
        """Tell whether there are convolutions of 1 x 1 with a stride, as in ResNets.

        Their backward pass with channels last ends the process: oneDNN, torch 2.13, odd batches, AVX-512.
        """
        convolutions = (m for m in self.module.modules() if isinstance(m, nn.Conv2d))
        return any(m.kernel_size == (1, 1) != m.stride for m in convolutions)

    def _passes(self, inputs: Tensor) -> bool:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        with untouched(self.module), torch.enable_grad():
            try:
                leaves = pytree.tree_leaves(self.module(inputs.to(self.vector)))
                total = torch.stack([leaf.sum() for leaf in leaves if isinstance(leaf, Tensor)]).sum()
                torch.autograd.grad(total, parameters, allow_unused=True)
            except RuntimeError:
                return False
        return True

    def load(self, values: Values) -> None:
        """Overwrite all parameters."""
        if values.shape != (self.size,):
            raise ModelError(f"expected {self.size} parameters, got {values.shape}")
        if self.vector.device.type == "cpu":
            np.copyto(self.vector.numpy(), values)
        else:
            self.vector.copy_(torch.tensor(values))

    def named_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters of this model's shapes as views of ``flat`` (d,)."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        pieces = torch.split(flat, sizes)
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}


def initial_vector(name: str, seed: int) -> Values:
    """Return the first model of a run as a flat vector; the same seed gives the same bits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        values: Values = FlatModel(build(name)).vector.numpy().copy()
    return values
