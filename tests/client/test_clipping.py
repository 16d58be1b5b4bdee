"""The engine against a loop over the records, for every kind of layer."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from client.clipping import book_keeping, convolution, linear
from client.clipping.book_keeping import ClippedSum
from client.clipping.self_check import require_agreement
from common.errors import ModelError
from common.models import FlatModel, build
from tests.support import CLASSES, FEATURES, SMALL_MODEL, brute_force_clipped_sum

TOKENS, LENGTH, SIDE = 11, 6, 9
BATCHES = [0, 1, 7, 64]


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


# One row for every kind of layer: what the inputs are, and a network around the layer.
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


NETWORKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "output changed in place": ("vectors", ChangedOutput),
    "linear": ("vectors", lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))),
    "linear without bias": ("vectors", lambda: nn.Linear(FEATURES, CLASSES, bias=False)),
    "linear on sequences": ("tokens", lambda: Tokens(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 6)))),
    "linear called twice": (
        "vectors",
        lambda: nn.Sequential(Twice(nn.Linear(FEATURES, FEATURES)), nn.Linear(FEATURES, 3)),
    ),
    "frozen weight": ("vectors", lambda: _frozen(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3)))),
    "conv2d": ("pictures", lambda: pictures(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.MaxPool2d(2), width=36)),
    "conv2d, stride, padding": ("pictures", lambda: pictures(nn.Conv2d(2, 4, (3, 2), stride=2, padding=1), width=100)),
    "conv2d, dilation": ("pictures", lambda: pictures(nn.Conv2d(2, 4, 3, dilation=2, bias=False), width=100)),
    "conv2d, groups": ("pictures", lambda: pictures(nn.Conv2d(2, 6, 3, groups=2, stride=(2, 1)), width=168)),
    "conv2d, same, circular": (
        "pictures",
        lambda: pictures(nn.Conv2d(2, 3, 4, padding="same", padding_mode="circular"), width=243),
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
        lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.GroupNorm(4, 8), nn.Linear(8, 3)),
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


def _frozen(module: nn.Sequential) -> nn.Module:
    module[0].weight.requires_grad_(False)
    return module


def batch_of(kind: str, count: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    shapes = {"vectors": (FEATURES,), "pictures": (2, SIDE, SIDE)}
    if kind == "tokens":
        inputs = torch.tensor(rng.integers(0, TOKENS, (count, LENGTH)))
    else:
        inputs = torch.tensor(rng.normal(size=(count, *shapes[kind])), dtype=dtype)
    return inputs, torch.tensor(rng.integers(0, CLASSES, count))


def model_of(network: str, dtype: torch.dtype = torch.float64) -> FlatModel:
    torch.manual_seed(11)
    return FlatModel(NETWORKS[network][1](), dtype=dtype)


def some_kept(size: int, density: float, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).permutation(size)[: max(1, round(density * size))])


def engine_for(model: FlatModel, kept: np.ndarray, clip_norm: float, chunk: int = 1000) -> ClippedSum:
    return ClippedSum(model, None if kept.size == model.size else torch.tensor(kept), clip_norm, chunk)


@pytest.mark.parametrize("network", NETWORKS)
@settings(max_examples=6, deadline=None)
@given(
    count=st.sampled_from(BATCHES),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    clip_norm=st.sampled_from([0.01, 0.5, 100.0]),
    chunk=st.sampled_from([1, 5, 1000]),
    seed=st.integers(0, 1000),
)
def test_equals_a_loop_over_the_records(
    network: str, count: int, density: float, clip_norm: float, chunk: int, seed: int
) -> None:
    model = model_of(network)
    inputs, targets = batch_of(NETWORKS[network][0], count, seed)
    kept = some_kept(model.size, density, seed)
    expected = brute_force_clipped_sum(model, inputs, targets, kept, clip_norm)
    found = engine_for(model, kept, clip_norm, chunk)(inputs, targets).numpy()
    assert np.linalg.norm(found - expected) <= 1e-10 * max(np.linalg.norm(expected), 1e-3 * clip_norm)


@pytest.mark.parametrize("network", NETWORKS)
def test_single_precision(network: str) -> None:
    model = model_of(network, torch.float32)
    inputs, targets = batch_of(NETWORKS[network][0], 64, 3, torch.float32)
    kept = some_kept(model.size, 0.5, 3)
    expected = brute_force_clipped_sum(model, inputs, targets, kept, 0.1)
    found = engine_for(model, kept, 0.1)(inputs, targets).numpy()
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_passes_the_self_check(network: str) -> None:
    model = model_of(network, torch.float32)
    inputs, targets = batch_of(NETWORKS[network][0], 8, 3, torch.float32)
    for density in (0.3, 1.0):
        kept = some_kept(model.size, density, 1)
        engine = engine_for(model, kept, 1.0)
        require_agreement(model, engine, inputs, targets, None if density == 1 else torch.tensor(kept))


@pytest.mark.parametrize("network", ["linear", "linear on sequences", "conv2d, groups", "conv2d called twice"])
def test_blocks_of_any_size_give_the_same(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(network)
    inputs, targets = batch_of(NETWORKS[network][0], 20, 3)
    kept = some_kept(model.size, 0.5, 3)
    whole = engine_for(model, kept, 0.1)(inputs, targets).numpy()
    for module, name in [
        (linear, "_BLOCK_ENTRIES"),
        (convolution, "_BLOCK_ENTRIES"),
        (book_keeping, "_WRITTEN_ENTRIES"),
    ]:
        monkeypatch.setattr(module, name, 40)
    assert engine_for(model, kept, 0.1)(inputs, targets).numpy() == pytest.approx(whole, rel=1e-10)


def test_the_gram_trick_and_writing_down_agree() -> None:
    model = FlatModel(Tokens(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 6))), dtype=torch.float64)
    inputs, targets = batch_of("tokens", 9, 1)
    everything = np.arange(model.size)
    expected = brute_force_clipped_sum(model, inputs, targets, everything, 0.05)
    assert engine_for(model, everything, 0.05)(inputs, targets).numpy() == pytest.approx(expected, rel=1e-9)


def test_the_mask_goes_before_the_clip() -> None:
    model = FlatModel(build(SMALL_MODEL))
    inputs, targets = batch_of("vectors", 1, 0, torch.float32)
    clip_norm = 1e-3  # far below any gradient's norm, so that every record is clipped
    total = ClippedSum(model, torch.arange(0, model.size, 7), clip_norm, 8)(inputs, targets)
    assert total.norm().item() == pytest.approx(clip_norm, rel=1e-5)  # clip, then mask, would leave less


@pytest.mark.parametrize("network", ["linear", "conv2d"])
def test_records_that_are_not_finite_contribute_nothing_and_are_counted(network: str) -> None:
    model = model_of(network)
    inputs, targets = batch_of(NETWORKS[network][0], 5, 0)
    engine = engine_for(model, some_kept(model.size, 0.5, 0), 1.0)
    without = engine(inputs[[0, 2, 4]], targets[[0, 2, 4]])
    assert engine.dropped == 0
    inputs[1], inputs[3] = float("nan"), float("inf")
    assert torch.allclose(engine(inputs, targets), without, rtol=1e-10)
    assert engine.dropped == 2
    assert engine(inputs[[1, 3]], targets[[1, 3]]).abs().sum() == 0


def test_a_zero_gradient_does_not_divide_by_zero() -> None:
    model = FlatModel(build("tests.support:squared_error_model"))
    model.load(np.zeros(3, np.float32))
    assert ClippedSum(model, None, 1.0, 8)(torch.zeros(2, 2), torch.zeros(2)).tolist() == [0.0, 0.0, 0.0]


def test_dropout_is_drawn_once_per_forward_pass() -> None:
    model = FlatModel(nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)))
    inputs, targets = batch_of("vectors", 6, 0, torch.float32)
    require_agreement(model, ClippedSum(model, None, 1.0, 8), inputs, targets, None)
    results = []
    for _ in range(2):
        torch.manual_seed(4)
        results.append(ClippedSum(model, None, 1.0, 8)(inputs, targets))
    assert torch.equal(*results)
    assert not torch.equal(ClippedSum(model, None, 1.0, 8)(inputs, targets), results[0])


def test_parameters_are_left_as_they_were() -> None:
    module = _frozen(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)))
    model = FlatModel(module)
    before = [p.requires_grad for p in module.parameters()]
    ClippedSum(model, None, 1.0, 8)(*batch_of("vectors", 3, 0, torch.float32))
    assert [p.requires_grad for p in module.parameters()] == before
    assert not any(m._forward_hooks for m in module.modules())


class Functional(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self, call_too: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.call_too = call_too

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = nn.functional.linear(inputs, self.linear.weight)
        return outputs + self.linear(inputs) if self.call_too else outputs


class Centred(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        return outputs - outputs.mean(0)


class SequenceFirst(nn.Module):
    """Puts the records second before a linear layer: with as many positions as records nothing else would notice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 6)
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens).transpose(0, 1)).mean(0)


class ChangedInput(nn.Module):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.late:
            return self.second(self.first(inputs).mul_(2))
        hidden = self.first(inputs) + 1
        outputs = self.second(hidden)
        hidden.mul_(2)
        return outputs


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("network", "kind", "count", "message"),
    [
        (lambda: Functional(call_too=False), "vectors", 5, "'linear' was not called in the forward pass"),
        (lambda: Functional(call_too=True), "vectors", 5, "parameter 'linear.weight' is not the sum of its layer's"),
        (Centred, "vectors", 5, "depends on the other records"),
        (SequenceFirst, "tokens", 5, "'linear' expected an input whose dimension 0 is the 5 records"),
        (lambda: ChangedInput(late=False), "vectors", 5, "changes a layer's output in place"),
    ],
)
def test_models_that_cannot_be_clipped_are_refused_by_name(
    network: Callable[[], nn.Module], kind: str, count: int, message: str
) -> None:
    model = FlatModel(network())
    inputs, targets = batch_of(kind, count, 0, torch.float32)
    with pytest.raises(ModelError, match=message):
        require_agreement(model, ClippedSum(model, None, 1.0, 8), inputs, targets, None)


@pytest.mark.parametrize("margin", [1.0, 40.0, 60.0])
def test_a_model_that_is_sure_of_itself_is_not_taken_for_one_that_mixes_records(margin: float) -> None:
    """Its gradients all but vanish, so that the bound on rounding shows in their norms: that proves nothing."""
    inputs, _ = batch_of("vectors", 5, 0, torch.float32)
    targets = torch.zeros(5, dtype=torch.int64)
    network = nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        network.weight.zero_()
        network.bias.copy_(margin * nn.functional.one_hot(torch.tensor(0), CLASSES))
    model = FlatModel(network)
    require_agreement(model, ClippedSum(model, None, 1.0, 8), inputs, targets, None)


def test_an_input_that_is_changed_later_is_refused_by_name() -> None:
    model = FlatModel(ChangedInput(late=True))
    with pytest.raises(ModelError, match="'second' was given is changed in place"):
        ClippedSum(model, None, 1.0, 8)(*batch_of("vectors", 5, 0, torch.float32))


def test_shared_parameters_and_batch_norm_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'weight' of layer '2' is shared with layer '0'"):
        ClippedSum(FlatModel(tied()), None, 1.0, 8)
    with pytest.raises(ModelError, match="GroupNorm"):
        FlatModel(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
    with pytest.raises(ModelError, match="max_norm"):
        ClippedSum(FlatModel(Tokens(nn.Identity(), max_norm=1)), None, 1.0, 8)
