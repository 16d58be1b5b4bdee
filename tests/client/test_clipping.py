import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from client.clipping.per_record import PerRecordClippedSum
from common.models import FlatModel, build
from tests.support import CLASSES, FEATURES, SMALL_MODEL, brute_force_clipped_sum


def batch_of(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    inputs = torch.tensor(rng.normal(size=(count, FEATURES)), dtype=torch.float32)
    return inputs, torch.tensor(rng.integers(0, CLASSES, count))


@settings(max_examples=30, deadline=None)
@given(
    count=st.sampled_from([0, 1, 7, 40]),
    kept_share=st.sampled_from([0.0, 0.3, 1.0]),
    clip_norm=st.sampled_from([0.01, 0.5, 100.0]),
    chunk=st.sampled_from([1, 3, 64]),
    seed=st.integers(0, 1000),
)
def test_equals_a_loop_over_the_records(count: int, kept_share: float, clip_norm: float, chunk: int, seed: int) -> None:
    model = FlatModel(build(SMALL_MODEL))
    inputs, targets = batch_of(count, seed)
    kept = np.sort(np.random.default_rng(seed).permutation(model.size)[: max(1, int(kept_share * model.size))])
    engine = PerRecordClippedSum(
        model, None if kept.size == model.size else torch.tensor(kept), clip_norm, physical_batch_size=chunk
    )
    expected = brute_force_clipped_sum(model, inputs, targets, kept, clip_norm)
    assert engine(inputs, targets).numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5 * clip_norm)


def test_the_mask_goes_before_the_clip() -> None:
    model = FlatModel(build(SMALL_MODEL))
    inputs, targets = batch_of(1)
    kept = torch.arange(0, model.size, 7)
    clip_norm = 1e-3  # far below any gradient's norm, so that every record is clipped
    total = PerRecordClippedSum(model, kept, clip_norm, 8)(inputs, targets)
    assert total.norm().item() == pytest.approx(clip_norm, rel=1e-5)  # clip, then mask, would leave less


def test_records_that_are_not_finite_contribute_nothing() -> None:
    model = FlatModel(build(SMALL_MODEL))
    inputs, targets = batch_of(5)
    engine = PerRecordClippedSum(model, None, 1.0, 8)
    without = engine(inputs[[0, 2, 4]], targets[[0, 2, 4]])
    inputs[1], inputs[3] = float("nan"), float("inf")
    assert torch.allclose(engine(inputs, targets), without, atol=1e-6)


def test_a_zero_gradient_does_not_divide_by_zero() -> None:
    model = FlatModel(build("tests.support:squared_error_model"))
    model.load(np.zeros(3, np.float32))
    engine = PerRecordClippedSum(model, None, 1.0, 8)
    total = engine(torch.zeros(2, 2), torch.zeros(2))
    assert total.tolist() == [0.0, 0.0, 0.0]
