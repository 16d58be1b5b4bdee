from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from client.clipping.book_keeping import ClippedSum
from client.clipping.self_check import require_agreement
from common.errors import ModelError
from common.models import FlatModel, build, initial_vector, right_answers, sample_losses
from tests.support import brute_force_clipped_sum, site_data


def test_sizes_of_the_zoo() -> None:
    assert FlatModel(build("dp-cnn-s")).size == 26_010
    assert FlatModel(build("dp-cnn")).size == 550_570
    assert FlatModel(build("h-cnn-s")).size == 33_066
    assert FlatModel(build("linear-regression:20")).size == 21
    assert FlatModel(build("logistic-regression:20")).size == 21
    assert FlatModel(build("cbow:1000-100")).size == 100_000
    assert FlatModel(build("linear:784-10")).size == 7850
    assert FlatModel(build("mlp:784-128-10")).size == 784 * 128 + 128 + 1290


def test_zoo_outputs() -> None:
    assert build("dp-cnn-s")(torch.zeros(3, 28, 28)).shape == (3, 10)
    assert build("dp-cnn")(torch.zeros(3, 3, 32, 32)).shape == (3, 10)
    assert build("mlp:784-16-10")(torch.zeros(3, 28, 28)).shape == (3, 10)
    assert build("h-cnn-s")(torch.zeros(3, 81, 7, 7)).shape == (3, 10)
    assert build("cbow:7-4")(torch.zeros(3, 10)).shape == (3, 9)


def test_parameters_are_views_of_the_vector() -> None:
    model = FlatModel(build("mlp:4-3-2"))
    model.load(np.arange(model.size, dtype=np.float32))
    assert torch.cat([p.detach().flatten() for p in model.module.parameters()]).tolist() == list(range(model.size))
    gradient = model.gradient(torch.ones(1, 4), torch.tensor([1]))
    sample_losses(model.module, model.module(torch.ones(1, 4)), torch.tensor([1])).sum().backward()
    by_parameter = torch.cat([p.grad.flatten() for p in model.module.parameters() if p.grad is not None])
    assert torch.equal(gradient, by_parameter)
    assert gradient.abs().sum() > 0
    views = model.named_views(model.vector)
    assert all(torch.equal(views[name], p) for name, p in model.module.named_parameters())


def test_frozen_parameters_do_not_count() -> None:
    module = build("mlp:4-3-2")
    next(module.parameters()).requires_grad_(False)
    assert FlatModel(module).size == 3 + 6 + 2


def test_the_same_seed_gives_the_same_first_model() -> None:
    a, b, c = (initial_vector("dp-cnn-s", seed) for seed in (1, 1, 2))
    assert (a == b).all() and not (a == c).all()


def test_the_first_model_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    initial_vector("mlp:4-3-2", 99)
    assert torch.rand(1) == expected


def test_a_users_own_model_and_loss() -> None:
    module = build("tests.support:squared_error_model")
    losses = sample_losses(module, torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 0.0]))
    assert losses.tolist() == [1.0, 4.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "unknown model 'resnet': expected one of dp-cnn-s, dp-cnn"),
        ("mlp:784", "at least two widths"),
        ("mlp:784-x", "widths like 784-128-10"),
        ("no.such.module:net", "cannot load model .*PYTHONPATH"),
        ("torch.nn:NoSuchThing", "cannot load model"),
        ("builtins:len", "cannot build model 'builtins:len': .* expected a function without arguments"),
        ("builtins:dict", "expected builtins:dict to return a torch.nn.Module, got dict"),
    ],
)
def test_models_that_cannot_be_had(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(name)


def test_batch_norm_is_refused_with_the_fix() -> None:
    with pytest.raises(ModelError, match=r"'1' is a BatchNorm1d.*GroupNorm"):
        FlatModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_wrong_number_of_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="expected 23 parameters"):
        FlatModel(build("mlp:4-3-2")).load(np.zeros(22, np.float32))
    with pytest.raises(ModelError, match="no trainable"):
        FlatModel(nn.Tanh())


def test_regressions_have_the_textbook_losses() -> None:
    inputs = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    weights = np.array([0.3, -0.2, 0.1], np.float32)  # w, b
    scores = inputs @ torch.tensor(weights[:2]) + 0.1
    linear = FlatModel(build("linear-regression:2"))
    linear.load(weights)
    numbers = torch.tensor([0.7, -1.0])
    losses = sample_losses(linear.module, linear.module(inputs), numbers)
    assert torch.allclose(losses, (scores - numbers) ** 2)
    assert right_answers(linear.module(inputs), numbers) is None
    logistic = FlatModel(build("logistic-regression:2"))
    logistic.load(weights)
    classes = torch.tensor([1, 0])
    losses = sample_losses(logistic.module, logistic.module(inputs), classes)
    assert torch.allclose(losses, torch.log1p(torch.exp(torch.tensor([-1.0, 1.0]) * scores)))
    assert right_answers(logistic.module(inputs), classes) == int(scores[0] > 0) + int(scores[1] <= 0)


def test_cbow_has_the_loss_of_the_paper() -> None:
    model = FlatModel(build("cbow:6-3"))
    words = torch.tensor([[0.0, 1.0, 2.0, 5.0], [3.0, 3.0, 0.0, 0.0]])
    embedding = model.vector.view(6, 3)
    losses = sample_losses(model.module, model.module(words), torch.zeros(2, dtype=torch.long))
    for record, loss in zip(words.long(), losses, strict=True):
        target, context, *negatives = embedding[record]
        expected = -torch.sigmoid(target @ context).log()
        expected -= sum(torch.sigmoid(-target @ negative).log() for negative in negatives)
        assert loss.item() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "shape", "targets"),
    [
        ("linear-regression:4", (4,), None),
        ("logistic-regression:4", (4,), 2),
        ("cbow:9-5", None, 1),
        ("h-cnn-s", (81, 7, 7), 3),
    ],
)
def test_new_models_are_clipped_record_by_record(
    model: str, shape: tuple[int, ...] | None, targets: int | None
) -> None:
    flat = FlatModel(build(model), dtype=torch.float64)
    flat.load(np.random.default_rng(0).normal(size=flat.size) * 0.1)

    def example(count: int, device: torch.device, below: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng(count)
        inputs = rng.random((count, *shape)) if shape else rng.integers(0, 9, (count, 10))
        chosen = rng.random(count) if targets is None else rng.integers(0, targets, count)
        return torch.tensor(inputs, dtype=torch.float64), torch.tensor(chosen)

    require_agreement(flat, example)
    inputs, chosen = example(6, torch.device("cpu"))
    expected = brute_force_clipped_sum(flat, inputs, chosen, np.arange(flat.size), 0.05)
    assert ClippedSum(flat, None, 0.05, 4)(inputs, chosen).numpy() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_numbers_need_a_loss() -> None:
    with pytest.raises(ModelError, match="targets are numbers"):
        sample_losses(build("mlp:4-2"), torch.zeros(3, 2), torch.zeros(3))


@pytest.mark.parametrize("name", ["cbow:1000", "cbow:0-5", "linear-regression:x", "logistic-regression:2-3"])
def test_bad_sizes_are_named(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        build(name)


class TwoHeads(nn.Module):
    """Returns two outputs, of which its own loss makes one number a record."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 1, 3)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(inputs)
        return hidden, self.head(hidden)

    def loss(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return outputs[0].flatten(1).mean(1) ** 2 + (outputs[1].flatten(1).mean(1) - targets) ** 2


def test_models_with_two_outputs_on_pictures_are_checked_and_scored_by_their_loss() -> None:
    data = site_data(np.zeros((3, 1, 6, 6), np.uint8), np.arange(3))
    model = FlatModel.of(f"{__name__}:TwoHeads")
    require_agreement(model, data.example)
    inputs, targets = data.example(3, torch.device("cpu"))
    assert right_answers(model.module(inputs), targets) is None


def test_what_is_frozen_is_the_same_wherever_a_model_is_built() -> None:
    first, second = (FlatModel.of(f"{__name__}:TwoHeads").module for _ in range(2))
    assert torch.equal(first.frozen.weight, second.frozen.weight)


@pytest.mark.parametrize(
    ("kernel", "stride", "last"), [(1, 2, False), ((1, 1), (1, 2), False), (1, 1, True), (3, 2, True)]
)
def test_pictures_have_their_channels_last_but_for_shortcuts(kernel: Any, stride: Any, last: bool) -> None:
    """Torch 2.13 crashes in the backward pass of a strided convolution of 1 x 1 with channels last and odd batches."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, kernel, stride))
    laid_out = FlatModel(network).laid_out(torch.rand(3, 3, 8, 8))
    assert laid_out.is_contiguous(memory_format=torch.channels_last) is last


class Counting(nn.Module):
    """Remembers what it saw and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.seen = nn.Conv2d(3, 4, 3), nn.Buffer(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += len(inputs)
        return self.convolution(inputs) + torch.rand(1)


def test_to_choose_a_layout_shifts_nothing() -> None:
    network = Counting()
    torch.manual_seed(1)
    FlatModel(network).laid_out(torch.rand(3, 3, 8, 8, generator=torch.Generator()))
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert network.seen.item() == 0 and torch.equal(drawn, torch.rand(3))
