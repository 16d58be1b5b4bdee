import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import broadcast
from common.broadcast import (
    MOST_MASKS,
    decode,
    digest_of,
    encode_delta,
    encode_floats,
    encode_grid,
    encode_held,
    parts_of,
    union_of,
)
from common.coding import Values, from_grid
from common.errors import ModelMissing, WireError
from common.mask import MaskSpec
from common.plan import RoundPlan
from tests.support import small_plan

SIZE, STEP = 200, 0.03
RNG = np.random.default_rng(3)
NUMBERS = RNG.integers(-40, 40, SIZE).astype(np.int32)
MODEL = from_grid(NUMBERS, STEP)


def plan_to(model: Values, step: float = STEP) -> RoundPlan:
    return small_plan(SIZE, model_digest=digest_of(model), model_step=step)


def nothing(digest: str) -> Values | None:
    return None


def test_floats_round_trip_to_the_bit() -> None:
    for coding in ("f32", "f16"):
        model = RNG.normal(size=SIZE).astype(np.float16 if coding == "f16" else np.float32).astype(np.float32)
        data = encode_floats(model, coding)
        assert decode(data, plan_to(model, 0.0), nothing).tobytes() == model.tobytes()
        assert parts_of(data).values == SIZE * (4 if coding == "f32" else 2)
        assert parts_of(data).total == len(data)


def test_the_grid_round_trips_to_the_bit_and_is_short() -> None:
    data = encode_grid(NUMBERS)
    assert decode(data, plan_to(MODEL), nothing).tobytes() == MODEL.tobytes()
    assert len(data) < 1.2 * SIZE


@given(st.integers(1, SIZE), st.integers(1, SIZE), st.integers(0, 2**32 - 1))
def test_a_difference_on_masks_leads_to_the_same_bits(first: int, second: int, seed: int) -> None:
    masks = [MaskSpec(1, 0, SIZE, first), MaskSpec(1, 7, SIZE, second)]  # the plan's seed is 1
    moved = NUMBERS.copy()
    union = union_of(masks, SIZE)
    where = np.arange(SIZE) if union is None else union
    difference = np.random.default_rng(seed).integers(-3, 4, where.size).astype(np.int32)
    moved[where] += difference
    target = from_grid(moved, STEP)
    data = encode_delta(digest_of(MODEL), () if union is None else masks, difference)
    found = decode(data, plan_to(target), {digest_of(MODEL): MODEL}.get)
    assert found.tobytes() == target.tobytes()
    assert parts_of(data).index == (0 if union is None else 16)


def test_the_union_of_masks() -> None:
    masks = [MaskSpec(1, epoch, 50, 10) for epoch in range(3)]
    expected = sorted(set().union(*(mask.indices().tolist() for mask in masks)))
    assert union_of(masks, 50).tolist() == expected  # type: ignore[union-attr]
    assert union_of([*masks, MaskSpec(1, 5, 50, 50)], 50) is None
    assert union_of([], 50) is None


def test_a_model_that_is_not_held_is_asked_for() -> None:
    delta = encode_delta(digest_of(MODEL), (), np.ones(SIZE, np.int32))
    target = from_grid(NUMBERS + 1, STEP)
    with pytest.raises(ModelMissing, match="not held"):
        decode(delta, plan_to(target), nothing)
    with pytest.raises(ModelMissing, match="not held"):
        decode(encode_held(digest_of(MODEL)), plan_to(MODEL), nothing)
    # What is held under that name is another model: the result has another digest.
    with pytest.raises(ModelMissing, match="does not lead to"):
        decode(delta, plan_to(target), lambda digest: from_grid(NUMBERS + 5, STEP))
    assert decode(encode_held(digest_of(MODEL)), plan_to(MODEL), lambda digest: MODEL) is MODEL


def test_what_is_wrong_is_said() -> None:
    good = encode_grid(NUMBERS)
    too_many = [MaskSpec(1, epoch, SIZE, 5) for epoch in range(MOST_MASKS + 1)]
    for data, plan, message in [
        (b"", plan_to(MODEL), "at least 20 bytes, got 0"),
        (b"else" + good[4:], plan_to(MODEL), "version 1"),
        (good[:-1] + b"\x01", plan_to(MODEL), "checksum"),
        (good, plan_to(MODEL, 0.0), "no grid"),
        (good, plan_to(MODEL + 1), "expected the model"),
        (encode_floats(MODEL[:-1], "f32"), plan_to(MODEL, 0.0), "200 parameters in 800 bytes, got 796"),
        (encode_delta("0" * 16, too_many, np.zeros(3, np.int32)), plan_to(MODEL), "at most 64 masks"),
    ]:
        with pytest.raises(WireError, match=message):
            decode(data, plan, nothing)


@given(st.binary(max_size=80), st.integers(0, 4), st.integers(0, 3))
def test_hostile_bytes_are_an_error(body: bytes, form: int, masks: int) -> None:
    specs = [MaskSpec(1, epoch, SIZE, 5) for epoch in range(masks)]
    framed = broadcast._framed(form, bytes(8), specs, body)
    for data in (body, framed):
        with pytest.raises((WireError, ModelMissing)):
            decode(data, plan_to(MODEL), lambda digest: from_grid(NUMBERS + 9, STEP))
