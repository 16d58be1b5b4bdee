"""A network for every kind of layer, with inputs for it."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from common.models import FlatModel
from tests.support import CLASSES, FEATURES

TOKENS, LENGTH, SIDE = 11, 6, 9


class Tokens(nn.Module):
    """Embeds a sequence of tokens and hands it to a layer of the test's choice."""

    def __init__(self, middle: nn.Module, width: int = 6, **options: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width, **options)
        self.middle = middle
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)).mean(1))


class FirstOutput(nn.Module):
    """Takes the first of a layer's outputs, as one does with recurrent layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)[0]


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.batch_first:
            inputs = inputs.transpose(0, 1)
        outputs = self.attention(inputs, inputs, inputs)[0]
        return outputs if self.batch_first else outputs.transpose(0, 1)


class Scale(nn.Module):
    """A layer of a user's own, with a parameter of its own and a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.inner = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs * self.scale).tanh()


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.layer(inputs).tanh())


class Unsqueeze(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.unsqueeze(1)


def pictures(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, CLASSES))


def vectors(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.LazyLinear(CLASSES))


def wave(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(Unsqueeze(), *layers, nn.Flatten(), nn.Linear(width, CLASSES))


class FirstToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(TOKENS, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.rows(inputs[:, 0])


class ChangedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh()).mul_(2)


# One row for every kind of layer: what the inputs are, and a network around the layer.
NETWORKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "output changed in place": ("vectors", ChangedOutput),
    "linear": ("vectors", lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))),
    "linear without bias": ("vectors", lambda: nn.Linear(FEATURES, CLASSES, bias=False)),
    "linear on sequences": ("tokens", lambda: Tokens(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 6)))),
    "linear called twice": (
        "vectors",
        lambda: nn.Sequential(Twice(nn.Linear(FEATURES, FEATURES)), nn.Linear(FEATURES, 3)),
    ),
    "frozen weight": ("vectors", lambda: frozen(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3)))),
    "conv2d": ("pictures", lambda: pictures(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.MaxPool2d(2), width=36)),
    "conv2d, stride, padding": ("pictures", lambda: pictures(nn.Conv2d(2, 4, (3, 2), stride=2, padding=1), width=100)),
    "conv2d, dilation": ("pictures", lambda: pictures(nn.Conv2d(2, 4, 3, dilation=2, bias=False), width=100)),
    "conv2d, groups": ("pictures", lambda: pictures(nn.Conv2d(2, 6, 3, groups=2, stride=(2, 1)), width=168)),
    "conv2d, same, circular": (
        "pictures",
        lambda: pictures(nn.Conv2d(2, 3, 4, padding="same", padding_mode="circular"), width=243),
    ),
    "conv2d, 1 x 1 with a stride": (
        "pictures",
        lambda: pictures(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 8, 1, stride=2, bias=False), width=128),
    ),
    "two conv2d": ("pictures", lambda: pictures(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), width=125)),
    "conv2d called twice": ("pictures", lambda: pictures(Twice(nn.Conv2d(2, 2, 3, padding=1)), width=162)),
    "conv1d": ("vectors", lambda: wave(nn.Conv1d(1, 4, 3, stride=2, padding=2), nn.Tanh(), width=28)),
    "conv1d, groups, dilation": (
        "vectors",
        lambda: wave(nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Conv1d(4, 4, 2, groups=2, dilation=3), width=28),
    ),
    "conv3d": (
        "pictures",
        lambda: nn.Sequential(Unsqueeze(), nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(128, CLASSES)),
    ),
    "embedding": ("tokens", lambda: Tokens(nn.Identity())),
    "embedding of one token": ("tokens", FirstToken),
    "embedding with padding": ("tokens", lambda: Tokens(nn.Tanh(), padding_idx=0)),
    "layer norm": ("vectors", lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES))),
    "layer norm on sequences": ("tokens", lambda: Tokens(nn.LayerNorm(6))),
    "layer norm on pictures": ("pictures", lambda: pictures(nn.Conv2d(2, 4, 3), nn.LayerNorm((7, 7)), width=196)),
    "group norm": ("pictures", lambda: pictures(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), width=196)),
    "group norm on vectors": (
        "vectors",
        lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)),
    ),
    "instance norm": ("pictures", lambda: pictures(nn.InstanceNorm2d(2, affine=True), nn.Tanh(), width=162)),
    "attention": ("tokens", lambda: Tokens(Attention(batch_first=True))),
    "attention, batch second": ("tokens", lambda: Tokens(Attention(batch_first=False))),
    "transformer": (
        "tokens",
        lambda: Tokens(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True, activation="gelu")),
    ),
    "gru": ("tokens", lambda: Tokens(FirstOutput(nn.GRU(6, 6, batch_first=True)))),
    "lstm": ("tokens", lambda: Tokens(FirstOutput(nn.LSTM(6, 6, batch_first=True)))),
    "prelu": ("vectors", lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.PReLU(8), nn.Linear(8, CLASSES))),
    "a user's own": ("tokens", lambda: Tokens(Scale())),
    "relu in place": ("vectors", lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))),
}


def frozen(module: nn.Sequential) -> nn.Module:
    module[0].weight.requires_grad_(False)
    return module


def batch_of(kind: str, count: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    shapes = {"vectors": (FEATURES,), "pictures": (2, SIDE, SIDE)}
    if kind.endswith("tokens"):
        inputs = torch.tensor(rng.integers(0, TOKENS, (count, 3 if kind == "three tokens" else LENGTH)))
    else:
        inputs = torch.tensor(rng.normal(size=(count, *shapes[kind])), dtype=dtype)
    return inputs, torch.tensor(rng.integers(0, CLASSES, count))


def model_of(network: str, dtype: torch.dtype = torch.float64) -> FlatModel:
    torch.manual_seed(11)
    return FlatModel(NETWORKS[network][1](), dtype=dtype)


def some_kept(size: int, density: float, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).permutation(size)[: max(1, round(density * size))])
