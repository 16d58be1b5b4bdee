import numpy as np
import pytest
import torch
from torch import nn

from common.errors import ModelError
from common.models import FlatModel, build, initial_vector, sample_losses


def test_sizes_of_the_zoo() -> None:
    assert FlatModel(build("dp-cnn-s")).size == 26_010
    assert FlatModel(build("dp-cnn")).size == 550_570
    assert FlatModel(build("linear:784-10")).size == 7850
    assert FlatModel(build("mlp:784-128-10")).size == 784 * 128 + 128 + 1290


def test_zoo_outputs() -> None:
    assert build("dp-cnn-s")(torch.zeros(3, 28, 28)).shape == (3, 10)
    assert build("dp-cnn")(torch.zeros(3, 3, 32, 32)).shape == (3, 10)
    assert build("mlp:784-16-10")(torch.zeros(3, 28, 28)).shape == (3, 10)


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
