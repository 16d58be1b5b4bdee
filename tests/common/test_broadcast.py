import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import broadcast
from common.broadcast import (
    MOST_MASKS,
    decode,
    digest_of,
    encode_chosen_delta,
    encode_delta,
    encode_floats,
    encode_grid,
    encode_held,
    encode_mask,
    encode_reference,
    encode_scattered_delta,
    parts_of,
    union_of,
    unpack,
)
from common.coding import Values, from_grid
from common.errors import ModelMissing, WireError
from common.indices import encode_indices
from common.mask import MaskSpec, hold
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
        found = decode(data, plan_to(model, 0.0), nothing)
        assert found.tobytes() == model.tobytes() and not found.flags.writeable
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


@given(st.integers(0, SIZE), st.integers(0, 2**32 - 1))
def test_a_scattered_difference_leads_to_the_same_bits(count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    difference = np.zeros(SIZE, np.int32)
    difference[draw.permutation(SIZE)[:count]] = draw.choice([-2, -1, 1, 2], count)
    target = from_grid(NUMBERS + difference, STEP)
    data = encode_scattered_delta(digest_of(MODEL), difference)
    assert decode(data, plan_to(target), {digest_of(MODEL): MODEL}.get).tobytes() == target.tobytes()
    parts = parts_of(data)
    assert parts.total == len(data)
    assert parts.index == 8 + len(encode_indices(np.flatnonzero(difference), SIZE))


@pytest.mark.parametrize(
    ("data", "golden"),
    [
        (
            encode_grid(np.array([1, -2, 0, 3], np.int32)),
            "4653564d010200000000000000000000f7ea4df82951083e030000000000c3f4faa3",
        ),
        (
            encode_delta("0123456789abcdef", [MaskSpec(1, 7, 9, 3)], np.array([0, 1, -1], np.int32)),
            "4653564d010301000123456789abcdef8a1f80a10700000003000000fc12073f0100000000002d38d8a1",
        ),
        (
            encode_scattered_delta("0123456789abcdef", np.array([0, 5, 0, 0, -1, 0], np.int32)),
            "4653564d010600000123456789abcdef16bed17602000000010000002b1f8c1a3d050000000000601783f7",
        ),
        (encode_held("0123456789abcdef"), "4653564d010400000123456789abcdefd41a414d"),
    ],
)
def test_golden_bytes(data: bytes, golden: str) -> None:
    assert data.hex() == golden


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


def framed(form: str, body: bytes) -> bytes:
    return broadcast._framed(broadcast._FORMS.index(form), bytes(8), (), body)


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
        (framed("scattered", b"1234"), plan_to(MODEL), "at least 8 bytes, got 4"),
        (framed("scattered", struct.pack("<II", SIZE + 1, 0)), plan_to(MODEL), "201 of 200 coordinates"),
        (framed("scattered", struct.pack("<II", 3, 5)), plan_to(MODEL), "in 5 of 8 bytes"),
    ]:
        with pytest.raises(WireError, match=message):
            decode(data, plan, lambda digest: MODEL)


def test_the_most_masks_and_the_fewest_bytes() -> None:
    masks = [MaskSpec(1, epoch, SIZE, 5) for epoch in range(MOST_MASKS)]
    difference = np.zeros(union_of(masks, SIZE).size, np.int32)  # type: ignore[union-attr]
    data = encode_delta(digest_of(MODEL), masks, difference)
    assert decode(data, plan_to(MODEL), lambda digest: MODEL).tobytes() == MODEL.tobytes()
    for data, message in ((bytes(19), "at least 20 bytes, got 19"), (bytes(20), "a model of version 1")):
        with pytest.raises(WireError, match=message):
            decode(data, plan_to(MODEL), nothing)


def test_a_reference_comes_with_the_model_or_is_held() -> None:
    other, data = MODEL + 1, encode_floats(MODEL, "f32")
    block = encode_reference(encode_floats(other, "f32"))
    named = {"method": "importance", "model_digest": digest_of(MODEL), "reference_digest": digest_of(other)}
    plan = small_plan(SIZE, **named)
    rest, found = unpack(block + data, plan, nothing)
    assert rest == data and found is not None and found.tobytes() == other.tobytes()
    assert unpack(data, plan, {digest_of(other): other}.get) == (data, None)
    with pytest.raises(ModelMissing, match=f"the reference model {digest_of(other)} is not held here"):
        unpack(data, plan, nothing)
    assert unpack(data, replace(plan, reference_digest=digest_of(MODEL)), nothing) == (data, None)
    parts, alone = parts_of(block + data), parts_of(data)
    assert parts.total == len(block + data) and parts.header == alone.header + 12
    with pytest.raises(WireError, match="at least 12 bytes, got 11"):
        unpack(block[:11], plan, nothing)
    with pytest.raises(WireError, match="the checksum of FSVR does not match"):
        unpack(block[:-1], plan, nothing)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (encode_reference(encode_floats(MODEL, "f32")), "a reference model came with a plan that names none"),
        (encode_mask(MaskSpec(1, 0, SIZE, 5)), "a mask came with a plan that names none"),
    ],
)
def test_blocks_that_a_plan_does_not_name_are_refused(block: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        unpack(block + encode_grid(NUMBERS), plan_to(MODEL), {digest_of(MODEL): MODEL}.get)


def test_masks_and_models_of_other_sizes_are_refused() -> None:
    chosen = MaskSpec(1, 0, SIZE, 2, hold(np.array([0, SIZE - 1])))
    delta = encode_chosen_delta(digest_of(MODEL), chosen, np.zeros(2, np.int32))
    assert decode(delta, plan_to(MODEL), lambda digest: MODEL).tobytes() == MODEL.tobytes()
    unknown = encode_chosen_delta(digest_of(MODEL), replace(chosen, chosen="1" * 16), np.zeros(2, np.int32))
    with pytest.raises(ModelMissing, match="the mask 1111111111111111 is not held here"):
        decode(unknown, plan_to(MODEL), lambda digest: MODEL)
    with pytest.raises(WireError, match="a model of 200 parameters to start from, got 199"):
        decode(delta, plan_to(MODEL), lambda digest: MODEL[:-1])
    smaller = small_plan(SIZE - 1, model_digest=digest_of(MODEL[:-1]), model_step=STEP)
    with pytest.raises(WireError, match="a mask of 199 coordinates, got one that keeps 199"):
        decode(delta, smaller, lambda digest: MODEL[:-1])
    plan = replace(plan_to(MODEL), mask_chosen=chosen.chosen)  # which keeps 2 coordinates: the plan says 100
    with pytest.raises(WireError, match="a plan came with an impossible mask"):
        unpack(encode_grid(NUMBERS), plan, nothing)


@given(st.binary(max_size=80), st.integers(0, len(broadcast._FORMS)), st.integers(0, 3))
def test_hostile_bytes_are_an_error(body: bytes, form: int, masks: int) -> None:
    specs = [MaskSpec(1, epoch, SIZE, 5) for epoch in range(masks)]
    framed = broadcast._framed(form, bytes(8), specs, body)
    for data in (body, framed):
        with pytest.raises((WireError, ModelMissing)):
            decode(data, plan_to(MODEL), lambda digest: from_grid(NUMBERS + 9, STEP))
