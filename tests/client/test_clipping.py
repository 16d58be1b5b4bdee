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
from tests.client.networks import NETWORKS, TOKENS, Tokens, batch_of, frozen, model_of, some_kept
from tests.support import CLASSES, FEATURES, SMALL_MODEL, brute_force_clipped_sum

BATCHES = [0, 1, 7, 64]


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
    module = frozen(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)))
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
