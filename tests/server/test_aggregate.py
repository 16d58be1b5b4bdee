import numpy as np
import pytest

from common.config import ServerOptimizerName
from server.aggregate import ModelAverage, ServerOptimizer, weighted_mean

MODEL = np.arange(6, dtype=np.float32)
KEPT = np.array([1, 4])
UPDATE = np.array([0.5, -1.0], np.float32)


def test_weighted_mean() -> None:
    a, b = np.array([1.0, 2.0], np.float32), np.array([4.0, 8.0], np.float32)
    assert weighted_mean([(a, 1.0), (b, 1.0)]).tolist() == [2.5, 5.0]
    assert weighted_mean([(a, 3.0), (b, 1.0)]).tolist() == [1.75, 3.5]


def test_large_values_that_cancel_do_not_lose_small_ones() -> None:
    values = [np.array([v], np.float32) for v in (1e8, 1.0, -1e8)]
    assert weighted_mean([(v, 1.0) for v in values])[0] == pytest.approx(1 / 3, rel=1e-6)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_off_the_mask_model_and_state_stay(name: str) -> None:
    optimizer = ServerOptimizer(name, 0.1, 0.9, 6)  # type: ignore[arg-type]
    off = np.setdiff1d(np.arange(6), KEPT)
    model = MODEL
    for _ in range(3):
        model = optimizer.step(model, KEPT, UPDATE)
    assert (model[off] == MODEL[off]).all()
    assert (model[KEPT] != MODEL[KEPT]).all()
    assert all((array[off] == 0).all() for array in optimizer.state.values())
    assert MODEL.tolist() == list(range(6))  # the old model is not touched


def test_sgd_with_rate_one_adds_the_mean() -> None:
    assert ServerOptimizer("sgd", 1.0, 0.9, 6).step(MODEL, KEPT, UPDATE)[KEPT].tolist() == [1.5, 3.0]


def test_momentum_is_remembered_through_rounds_off_the_mask() -> None:
    optimizer = ServerOptimizer("momentum", 1.0, 0.5, 6)
    optimizer.step(MODEL, KEPT, UPDATE)
    optimizer.step(MODEL, np.array([0]), np.array([9.0], np.float32))
    moved = optimizer.step(MODEL, KEPT, UPDATE) - MODEL
    assert moved[KEPT].tolist() == pytest.approx([0.5 * 0.5 + 0.5, -0.5 - 1.0])


def test_adam_corrects_for_how_often_a_coordinate_was_kept() -> None:
    optimizer = ServerOptimizer("adam", 0.1, 0.9, 6)
    for _ in range(10):
        optimizer.step(MODEL, np.array([0]), np.array([1.0], np.float32))
    moved = optimizer.step(MODEL, np.array([1]), np.array([1.0], np.float32)) - MODEL
    # Its first step: mean and square are both corrected to 1, whatever happened elsewhere.
    assert moved[1] == pytest.approx(0.1 / (1 + 1e-3), rel=1e-5)


def test_the_average_over_rounds_forgets_at_its_decay() -> None:
    average = ModelAverage(0.5, 2)
    first, second, third = (np.array(pair, np.float32) for pair in ([1, 0], [3, 0], [7, 14]))
    assert average.of(first) is first  # nothing has been averaged yet
    for model in (first, second, third):
        average.add(model)
    assert average.of(first).tolist() == pytest.approx([(0.25 * 1 + 0.5 * 3 + 7) / 1.75, 14 / 1.75])


def test_without_a_decay_the_last_model_stands() -> None:
    average = ModelAverage(0.0, 2)
    average.add(np.zeros(2, np.float32))
    model = np.ones(2, np.float32)
    assert average.of(model) is model and not average.state


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_noise_gain_is_what_noise_alone_moves_the_model_by(name: ServerOptimizerName) -> None:
    rng, kept = np.random.default_rng(1), np.arange(4000)
    optimizer = ServerOptimizer(name, 0.7, 0.9, kept.size)
    model = np.zeros(kept.size, np.float32)
    for _ in range(200):  # adam's averages settle
        before = model
        model = optimizer.step(model, kept, rng.normal(0, 0.05, kept.size).astype(np.float32))
    assert optimizer.noise_gain(0.05) == pytest.approx((model - before).std(), rel=0.1)
