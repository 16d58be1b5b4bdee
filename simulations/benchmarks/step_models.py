"""The networks and batches of the step benchmark."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import models

_SEED = 1
_VOCABULARY = 10_000
_CONTEXT = 10
_TOKENS = 1_000
_SEQUENCE = 32
_NORMED_RECORDS = 16
_NEAR = 5e-7  # some ten times the rounding error of what a convolution gives here
_DRAWN = 128  # records drawn at a time


class ContextWords(nn.Module):
    """Guess a word from the mean of the words around it, as CBOW does: 2,010,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, 100)
        self.scores = nn.Linear(100, _VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores (batch, vocabulary) for words (batch, context)."""
        return self.scores(self.embedding(words).mean(1))


class SmallTransformer(nn.Module):
    """Two encoder layers and a mean over the sequence: 131,594 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 64)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.scores = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores (batch, classes) for tokens (batch, sequence)."""
        return self.scores(self.layers(self.embedding(tokens)).mean(1))


class _Attention(nn.Module):
    """Self-attention whose projections are linear layers, for those who have no rule for nn.MultiheadAttention.

    Opacus' own replacement for it, DPMultiheadAttention, mixes up heads and positions where the batch comes first
    (https://github.com/meta-pytorch/opacus/pull/825).
    """

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self._heads = attention.num_heads
        for name, weight, bias in zip(
            "qkv", attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True
        ):
            linear = nn.Linear(weight.shape[1], weight.shape[0])
            linear.load_state_dict({"weight": weight, "bias": bias})
            self.add_module(f"{name}linear", linear)
        self.out_proj = nn.Linear(attention.embed_dim, attention.embed_dim)
        self.out_proj.load_state_dict(attention.out_proj.state_dict())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return what nn.MultiheadAttention returns for one sequence and no mask."""
        heads = [
            linear(tensor).unflatten(2, (self._heads, -1)).transpose(1, 2)  # (batch, heads, T, width / heads)
            for linear, tensor in ((self.qlinear, query), (self.klinear, key), (self.vlinear, value))
        ]
        return self.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)), None


def with_linear_attention(network: nn.Module) -> nn.Module:
    """Return the network with every attention replaced by one that is made of linear layers."""
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.MultiheadAttention):
                module.add_module(name, _Attention(child))
    return network


@dataclass(frozen=True, slots=True)
class Model:
    """A network of the benchmark, and what its records look like.

    ``pictures`` tells whether the memory layout matters: the zoo's networks put pictures channels last by themselves.
    """

    name: str
    bar_name: str | None
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    classes: int
    words: int = 0  # how many different tokens the records have; 0 where they are numbers
    pictures: bool = False

    def network(self) -> nn.Module:
        """Return the network with the weights that every method starts from."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            return self.build()

    def bare_network(self) -> nn.Module:
        """Return the same network, with the same names, that leaves its input's memory layout alone."""
        network = self.network()
        if self.pictures:
            assert isinstance(network, nn.Sequential)
            network[0] = nn.Identity()
        return network

    def batch(self, size: int, screened: bool = True) -> tuple[Tensor, Tensor]:
        """Return random records and their targets, in the memory layout that a data loader gives.

        ``screened`` leaves out records with a near tie in a max pool: there the rounding error decides which input the
        gradient goes to, so that methods which are both right disagree.
        """
        generator = torch.Generator().manual_seed(_SEED)
        targets = torch.randint(self.classes, (size,), generator=generator)
        if self.words:
            return torch.randint(self.words, (size, *self.input_shape), generator=generator), targets
        if not (self.pictures and screened):
            return torch.randn((size, *self.input_shape), generator=generator), targets
        network, found = self.bare_network(), []
        while sum(map(len, found)) < size:
            drawn = torch.randn((_DRAWN, *self.input_shape), generator=generator)
            found.append(drawn[~_near_ties(network, drawn)])
        return torch.cat(found)[:size].clone(), targets


MODELS = {
    model.name: model
    for model in (
        Model("dp-cnn-s", "dp_cnn_s", lambda: models.build("dp-cnn-s"), (1, 28, 28), 10, pictures=True),
        Model("dp-cnn", "dp_cnn", lambda: models.build("dp-cnn"), (3, 32, 32), 10, pictures=True),
        Model("mlp", "mlp", lambda: models.build("mlp:784-1024-1024-10"), (784,), 10),
        Model("embedding", "embedding", ContextWords, (_CONTEXT,), _VOCABULARY, words=_VOCABULARY),
        Model("transformer", None, SmallTransformer, (_SEQUENCE,), 10, words=_TOKENS),
    )
}


def size_of(network: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def random_mask(size: int, density: float) -> Tensor | None:
    """Return which of ``size`` coordinates are kept, at random; None where all are."""
    if density == 1:
        return None
    kept = torch.zeros(size, dtype=torch.bool)
    kept[torch.randperm(size, generator=torch.Generator().manual_seed(_SEED))[: round(density * size)]] = True
    return kept


def typical_norm(network: nn.Module, inputs: Tensor, targets: Tensor, mask: Tensor | None) -> float:
    """Return the median norm of a record's masked gradient: a clip norm that clips about half of the records."""
    norms = []
    parameters = list(network.parameters())
    for i in range(min(_NORMED_RECORDS, len(inputs))):
        loss = F.cross_entropy(network(inputs[i : i + 1]), targets[i : i + 1])
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
        norms.append((gradient if mask is None else gradient[mask]).norm())
    return float(torch.stack(norms).median())


@torch.no_grad()
def _near_ties(network: nn.Module, inputs: Tensor) -> Tensor:
    """Tell of every record (batch,) whether a max pool of the network has two nearly equal candidates for it."""
    found = torch.zeros(len(inputs), dtype=torch.bool)

    def look(pool: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
        assert isinstance(pool, nn.MaxPool2d)
        size, stride = pool.kernel_size, pool.stride
        windows = arguments[0].unfold(2, size, stride).unfold(3, size, stride).flatten(4)  # (batch, in, y, x, size^2)
        first, second = windows.topk(2).values.unbind(-1)
        found.logical_or_((first - second < _NEAR).flatten(1).any(1))

    hooks = [m.register_forward_hook(look) for m in network.modules() if isinstance(m, nn.MaxPool2d)]
    network(inputs)
    for hook in hooks:
        hook.remove()
    return found
