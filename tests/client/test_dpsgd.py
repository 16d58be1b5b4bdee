import numpy as np
import pytest
import torch

from client.dpsgd import train_round
from common.models import FlatModel, build, initial_vector
from simulations.seeded import GeneratorRandomness
from tests.support import SMALL_MODEL, brute_force_clipped_sum, silent, site_data, small_dataset, small_plan

DATA = small_dataset()
START = initial_vector(SMALL_MODEL, 3)
SIZE = START.size


def model_at(start: np.ndarray) -> FlatModel:
    model = FlatModel(build(SMALL_MODEL))
    model.load(start)
    return model


def test_off_the_mask_nothing_changes_by_one_bit() -> None:
    model = model_at(START)
    plan = small_plan(SIZE, steps=5, sampling_rate=0.3)
    randomness = GeneratorRandomness(np.random.default_rng(1), np.random.default_rng(2))
    moved = train_round(model, site_data(DATA.train_inputs, DATA.train_targets), plan, randomness)
    kept = plan.mask.indices()
    off = np.setdiff1d(np.arange(SIZE), kept)
    after = model.vector.numpy()
    assert (after[off].view(np.uint32) == START[off].view(np.uint32)).all()
    assert (after[kept] != START[kept]).all()
    assert after[kept] == pytest.approx(START[kept] + moved)


def test_without_noise_and_with_full_batches_it_is_centralised_random_sparsification() -> None:
    model = model_at(START)
    plan = small_plan(SIZE, steps=4, learning_rate=0.7, clip_norm=0.3)
    moved = train_round(model, site_data(DATA.train_inputs, DATA.train_targets), plan, silent())

    kept, reference = plan.mask.indices(), model_at(START)
    inputs, targets = torch.tensor(DATA.train_inputs), torch.tensor(DATA.train_targets)
    for _ in range(4):
        total = brute_force_clipped_sum(reference, inputs, targets, kept, 0.3)
        step = torch.tensor(0.7 * total / len(targets), dtype=torch.float32)
        reference.vector[torch.tensor(kept)] -= step
    assert moved == pytest.approx(reference.vector.numpy()[kept] - START[kept], abs=1e-5)


def test_noise_is_drawn_for_kept_coordinates_alone_and_scaled_by_the_expected_batch() -> None:
    data = site_data(DATA.train_inputs[:0], DATA.train_targets[:0], declared_size=50)
    plan = small_plan(SIZE, steps=1, sampling_rate=0.2, noise_multiplier=2.0, clip_norm=3.0, learning_rate=0.5)
    noise = np.random.default_rng(4).standard_normal(plan.mask.kept, dtype=np.float32)
    randomness = GeneratorRandomness(np.random.default_rng(1), np.random.default_rng(4))
    moved = train_round(model_at(START), data, plan, randomness)
    assert moved == pytest.approx(-0.5 * 2.0 * 3.0 * noise / (0.2 * 50), rel=1e-5)


def test_an_empty_batch_is_a_step_like_any_other() -> None:
    data = site_data(DATA.train_inputs[:0], DATA.train_targets[:0], declared_size=10)
    randomness = GeneratorRandomness(np.random.default_rng(1), np.random.default_rng(2))
    moved = train_round(model_at(START), data, small_plan(SIZE, steps=3), randomness)
    assert (moved != 0).all()


def test_momentum_stays_on_the_mask_and_accumulates() -> None:
    data = site_data(DATA.train_inputs, DATA.train_targets)
    plan = small_plan(SIZE, steps=2, momentum=0.9, learning_rate=0.01)
    plain = small_plan(SIZE, steps=2, momentum=0.0, learning_rate=0.01)
    one_step = small_plan(SIZE, steps=1, learning_rate=0.01)
    model = model_at(START)
    with_momentum = train_round(model, data, plan, silent())
    off = np.setdiff1d(np.arange(SIZE), plan.mask.indices())
    assert (model.vector.numpy()[off] == START[off]).all()
    first = train_round(model_at(START), data, one_step, silent())
    without = train_round(model_at(START), data, plain, silent())
    # v2 = 0.9 v1 + g2, so the second step goes 0.9 of the first one further.
    assert with_momentum == pytest.approx(without + 0.9 * first, rel=1e-3, abs=1e-7)


def test_physical_batches_change_nothing() -> None:
    data = site_data(DATA.train_inputs, DATA.train_targets)
    results = [
        train_round(model_at(START), data, small_plan(SIZE, steps=3, physical_batch_size=size), silent())
        for size in (1, 50, 1000)
    ]
    assert results[0] == pytest.approx(results[1], abs=1e-6)
    assert results[1] == pytest.approx(results[2], abs=1e-6)


def test_a_plan_that_is_not_private_neither_clips_nor_adds_noise() -> None:
    data = site_data(DATA.train_inputs, DATA.train_targets)
    randomness = GeneratorRandomness(np.random.default_rng(1), np.random.default_rng(2))
    plan = small_plan(SIZE, private=False, noise_multiplier=0.0, clip_norm=1e-6)
    moved = train_round(model_at(START), data, plan, randomness)
    reference = model_at(START)
    inputs, targets = torch.tensor(DATA.train_inputs), torch.tensor(DATA.train_targets)
    kept = plan.mask.indices()
    total = brute_force_clipped_sum(reference, inputs, targets, kept, clip_norm=1e9)
    assert moved == pytest.approx(-total / len(targets), abs=1e-6)
