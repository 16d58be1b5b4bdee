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
from client.data import SiteData
from common.errors import ModelError
from common.models import FlatModel, build
from tests.client.networks import LENGTH, NETWORKS, TOKENS, Tokens, batch_of, frozen, model_of, some_kept
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
    """Within gamma_n of the exact sum, times its condition, whatever order a processor adds in.

    gamma_n = n u for sums of n terms with unit roundoff u (Higham 2002, section 3.1), n = the terms of all sums that
    follow on each other. Condition: by how much the exact sum moves, relative to a change of each input and parameter.
    """
    model, exact = model_of(network, torch.float32), model_of(network)
    inputs, targets = batch_of(NETWORKS[network][0], 64, 3, torch.float32)
    kept = some_kept(model.size, 0.5, 3)
    found = engine_for(model, kept, 0.1)(inputs, targets).numpy()

    def exact_sum(change: Callable[[Tensor], Tensor]) -> np.ndarray:
        exact.vector.copy_(change(model.vector.double()))
        changed = change(inputs.double()) if inputs.is_floating_point() else inputs
        return brute_force_clipped_sum(exact, changed, targets, kept, 0.1)

    def up_or_down(values: Tensor) -> Tensor:
        return values * (1 + 1e-7 * torch.randn(values.shape, dtype=values.dtype).sign())

    expected = exact_sum(lambda values: values)
    torch.manual_seed(0)
    condition = max(np.linalg.norm(exact_sum(up_or_down) - expected) for _ in range(8)) / 1e-7
    fan_in = sum(p[0].numel() for p in model.module.parameters() if p.dim() > 1)
    terms = len(inputs) + inputs[0].numel() + fan_in
    assert np.linalg.norm(found - expected) <= terms * 2**-24 * condition


def check(model: FlatModel, kind: str) -> None:
    """Have a model checked on made-up records of a kind."""
    require_agreement(model, lambda count, device, below: batch_of(kind, count, 0, torch.float32))


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_passes_the_self_check(network: str) -> None:
    model = model_of(network, torch.float32)
    before = model.vector.clone()
    check(model, NETWORKS[network][0])
    assert torch.equal(model.vector, before)


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
    check(model, "vectors")
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


class Standardised(nn.Module):
    """Batch statistics written by hand: of a single record they are not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        centred = outputs - outputs.mean(0)
        return centred / (centred**2).mean(0).sqrt()


class ZeroBranch(nn.Module):
    """Mixes records in a branch whose last layer begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(FEATURES, CLASSES), Centred()
        self.last = nn.Linear(CLASSES, CLASSES)
        nn.init.zeros_(self.last.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.trunk(inputs) + self.last(self.branch(inputs))


class Bounded(nn.Module):
    """Has no gradient anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).sign()


@pytest.mark.parametrize(
    ("network", "kind", "message"),
    [
        (lambda: Functional(call_too=False), "vectors", "'linear' was not called in the forward pass"),
        (lambda: Functional(call_too=True), "vectors", "parameter 'linear.weight' is not the sum of its layer's"),
        (Centred, "vectors", "depends on the other records"),
        (ZeroBranch, "vectors", "depends on the other records"),
        (Standardised, "vectors", "cannot be checked before it is trained: .* not finite"),
        (Bounded, "vectors", "cannot be checked before it is trained: .* no gradient"),
        (SequenceFirst, "tokens", "'linear' expected an input whose dimension 0 is the 5 records"),
        (SequenceFirst, "three tokens", "'linear' expected an input whose dimension 0 is the 5 records"),
        (lambda: ChangedInput(late=False), "vectors", "changes a layer's output in place"),
    ],
)
def test_models_that_cannot_be_clipped_are_refused_by_name(
    network: Callable[[], nn.Module], kind: str, message: str
) -> None:
    torch.manual_seed(5)
    model = FlatModel(network())
    for _ in range(2):  # nor are they trusted the next time
        with pytest.raises(ModelError, match=message):
            check(model, kind)


class OfTokens(nn.Module):
    """Embeds tokens, pools them and does with the batch what a test chooses."""

    def __init__(self, done: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, 6), nn.Linear(6, CLASSES)
        self.done = done

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.done(self.embedding(tokens.long()), tokens))


def masked_mean(embedded: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean over the tokens that are no padding; of padding alone it is not a number."""
    there = (tokens.long() != 0)[:, :, None]
    return (embedded * there).sum(1) / there.sum(1)


class ByClass(nn.Linear):
    """Weights each record by how many of its batch share its class."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = 1 / torch.bincount(targets, minlength=CLASSES)[targets]
        return weights * nn.functional.cross_entropy(outputs, targets, reduction="none")


class RunningMean(nn.Module):
    """Keeps a mean of all batches, used before it is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        centred = inputs - self.mean
        self.mean.lerp_(inputs.detach().mean(0), 1e-3)
        return self.linear(centred)


class Rescaled(nn.Module):
    """Divides by the largest entry of the batch where that is above 1, as pictures of bytes are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs / inputs.max() if inputs.max() > 1 else inputs)


TOKEN_DATA = SiteData(np.zeros((4, LENGTH), np.float32), np.zeros(4, np.int64), np.arange(4), 4)
VECTOR_DATA = SiteData(np.zeros((4, FEATURES), np.float32), np.zeros(4, np.int64), np.arange(4), 4)


@pytest.mark.parametrize(
    ("network", "data", "message"),
    [
        (lambda: OfTokens(lambda e, _: e.mean(1) - e.mean((0, 1))), TOKEN_DATA, "depends on the other records"),
        (lambda: OfTokens(lambda e, _: e.mean(1).roll(1, 0)), TOKEN_DATA, "depends on the other records"),
        (lambda: ByClass(FEATURES, CLASSES), VECTOR_DATA, "depends on the other records"),
        (Rescaled, VECTOR_DATA, "depends on the other records"),
        (RunningMean, VECTOR_DATA, "changes its buffer 'mean'"),
    ],
)
def test_what_a_sites_made_up_records_show(network: Callable[[], nn.Module], data: SiteData, message: str) -> None:
    torch.manual_seed(5)
    module = network()
    before = [buffer.clone() for buffer in module.buffers()]
    with pytest.raises(ModelError, match=message):
        require_agreement(FlatModel(module), data.example)
    assert all(map(torch.equal, before, module.buffers()))


class ByName(nn.Module):
    """Gives attention what it needs by name, and hides padding from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, 6), nn.Linear(6, CLASSES)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.temperature = Temperature()

    def forward(self, tokens: Tensor) -> Tensor:
        embedded, padding = self.embedding(tokens.long()), tokens.long() == 0
        attended, _ = self.attention(query=embedded, key=embedded, value=embedded, key_padding_mask=padding)
        return self.temperature(self.head(attended.mean(1)))


class Temperature(nn.Module):
    """Owns a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs * self.scale.exp()


class BagOfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(TOKENS, 6, padding_idx=0), nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens.long()))


@pytest.mark.parametrize(
    ("network", "data"),
    [
        (lambda: OfTokens(masked_mean), TOKEN_DATA),
        (ByName, TOKEN_DATA),
        (BagOfTokens, TOKEN_DATA),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of EmbeddingBag under torch.func
def test_sound_models_pass_on_a_sites_made_up_records(network: Callable[[], nn.Module], data: SiteData) -> None:
    torch.manual_seed(5)
    model = FlatModel(network())
    require_agreement(model, data.example)
    rng = np.random.default_rng(1)
    inputs = torch.tensor(rng.integers(1, TOKENS, (7, *data.inputs.shape[1:])), dtype=torch.float32)
    targets = torch.zeros(7, dtype=torch.int64)
    expected = brute_force_clipped_sum(model, inputs, targets, np.arange(model.size), 0.05)
    found = engine_for(model, np.arange(model.size), 0.05)(inputs, targets).numpy()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_dropout_in_a_layer_that_is_redone_is_refused_by_the_check() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)  # its dropout is 0.1
    with pytest.raises(ModelError, match="dropout"):
        check(FlatModel(Tokens(layer)), "tokens")


class Expert(nn.Module):
    """Asks a layer only where some record needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.expert = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        needed = inputs[:, :1] > 0
        outputs = self.trunk(inputs)
        return outputs + needed * self.expert(inputs) if needed.any() else outputs


def test_a_layer_that_no_record_of_a_batch_needs_fails_nothing() -> None:
    """Else whether a round fails would tell whether the one record is in that needs it."""
    torch.manual_seed(5)
    model = FlatModel(Expert(), dtype=torch.float64)
    inputs, targets = batch_of("vectors", 6, 0)
    inputs[:, 0] = -1.0
    for _ in range(2):
        expected = brute_force_clipped_sum(model, inputs, targets, np.arange(model.size), 0.05)
        found = engine_for(model, np.arange(model.size), 0.05)(inputs, targets).numpy()
        assert found == pytest.approx(expected, rel=1e-9)
        inputs[2, 0] = 1.0


@pytest.mark.parametrize("margin", [1.0, 40.0, 60.0])
def test_a_model_that_is_sure_of_itself_is_judged_by_other_parameters(margin: float) -> None:
    """Its own gradients all but vanish, so that the bound on rounding shows in their norms: that proves nothing."""
    network = nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        network.weight.zero_()
        network.bias.copy_(margin * nn.functional.one_hot(torch.tensor(0), CLASSES))
    check(FlatModel(network), "vectors")


class SharedRows(nn.Module):
    """Attention under a mask of positions, which all records share: (positions, positions)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        attended, _ = self.attention(embedded, embedded, embedded, attn_mask=later, need_weights=False)
        return self.head(attended.mean(1))


class Neighbours(nn.Module):
    """A graph layer: its second tensor says which of the LENGTH features hang together, for all records alike."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = _Mix()
        self.register_buffer("adjacent", torch.eye(LENGTH).roll(1, 0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(tokens.float().unsqueeze(2), self.adjacent).mean(1)


class _Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, CLASSES))

    def forward(self, nodes: Tensor, adjacent: Tensor) -> Tensor:
        return torch.tanh(adjacent @ nodes @ self.weight)


@pytest.mark.parametrize("network", [SharedRows, Neighbours])
@pytest.mark.parametrize("count", [1, LENGTH - 1, LENGTH, LENGTH + 1])
def test_what_all_records_share_may_have_as_many_rows_as_the_batch(
    network: Callable[[], nn.Module], count: int
) -> None:
    torch.manual_seed(5)
    model = FlatModel(network())
    check(model, "tokens")
    inputs, targets = batch_of("tokens", count, 1)
    kept = some_kept(model.size, 0.5, 2)
    expected = brute_force_clipped_sum(model, inputs, targets, kept, 0.05)
    assert engine_for(model, kept, 0.05)(inputs, targets).numpy() == pytest.approx(expected, rel=1e-4, abs=1e-6)


class BesideTheBatch(nn.Module):
    """Gives a layer a second tensor whose second dimension counts the records."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = _Beside()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.mix(inputs, inputs.T)


class _Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES, CLASSES))

    def forward(self, inputs: Tensor, turned: Tensor) -> Tensor:
        return (inputs + turned.T) @ self.weight


def test_layers_whose_tensors_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'mix' expected an input whose dimension 0 .* got \(12, 5\)"):
        check(FlatModel(BesideTheBatch()), "vectors")
    with pytest.raises(ModelError, match="not known which of them count the records"):
        ClippedSum(FlatModel(Neighbours()), None, 1.0, 8)(*batch_of("tokens", 4, 1))


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
