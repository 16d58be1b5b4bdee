from dataclasses import replace

import numpy as np
import pytest

from client.site import Shelf
from common.broadcast import MOST_STEPS, digest_of, encode_delta, encode_scattered_delta, parts_of, unpack
from common.coding import ModelCoding, Values, to_grid
from common.mask import MaskSpec
from common.plan import RoundPlan
from server.downlink import Downlink
from tests.support import small_plan

SIZE, STEP = 2000, 0.01


def plan_of(downlink: Downlink) -> RoundPlan:
    return small_plan(SIZE, model_digest=downlink.digest, model_step=downlink.step)


def moved(model: Values, mask: MaskSpec, seed: int) -> Values:
    after = model.copy()
    noise = np.random.default_rng(seed).normal(0, STEP, mask.kept)
    after[mask.indices()] += noise.astype(np.float32)
    return after


def masks(count: int, kept: int = SIZE // 4) -> list[MaskSpec]:
    return [MaskSpec(1, epoch, SIZE, kept) for epoch in range(count)]


@pytest.mark.parametrize("coding", ["calibrated", "f32", "f16"])
def test_sites_stay_bit_identical_with_partial_participation_and_late_joiners(coding: ModelCoding) -> None:
    downlink = Downlink(coding, STEP)
    own = np.random.default_rng(1).normal(0, 0.1, SIZE).astype(np.float32)
    shelves: dict[int, Shelf] = {}
    draw = np.random.default_rng(2)
    downlink.publish(own, 0, None)
    for version, mask in enumerate(masks(25), start=1):
        for site in draw.choice(12, 5, replace=False).tolist():
            shelf = shelves.setdefault(site, Shelf(2))
            received = shelf.received(plan_of(downlink), downlink.bytes_for(site))
            assert received.tobytes() == downlink.model.tobytes()
            downlink.confirm(site)
        own = moved(own, mask, version)
        before = downlink.model
        downlink.publish(own, version, mask)
        off = np.setdiff1d(np.arange(SIZE), mask.indices())
        assert before[off].tobytes() == downlink.model[off].tobytes()
    assert len(shelves) == 12


def test_rounding_errors_do_not_add_up() -> None:
    downlink = Downlink("calibrated", STEP)
    own = np.zeros(SIZE, np.float32)
    downlink.publish(own, 0, None)
    for version, mask in enumerate(masks(200), start=1):
        own = own.copy()
        own[mask.indices()] += np.float32(STEP / 7)  # always rounded away, unless the error is carried on
        downlink.publish(own, version, mask)
    assert np.abs(downlink.model - own).max() <= STEP / 2 * (1 + 1e-6)
    assert downlink.model.mean() == pytest.approx(own.mean(), rel=0.01)


def test_the_smallest_form_is_sent() -> None:
    downlink = Downlink("calibrated", STEP)
    own = np.random.default_rng(1).normal(0, 0.1, SIZE).astype(np.float32)
    downlink.publish(own, 0, None)
    whole = len(downlink.bytes_for(0))
    assert whole < SIZE  # five bits a parameter
    for site in range(3):
        downlink.confirm(site)
    assert len(downlink.bytes_for(0)) == 20  # the round was abandoned: nothing has changed
    sizes = []
    for version, mask in enumerate(masks(12), start=1):
        own = moved(own, mask, version)
        downlink.publish(own, version, mask)
        if version > 1:
            downlink.confirm(1)
        sizes.append(len(downlink.bytes_for(0)))
    assert sizes[0] < whole / 4 and sizes == sorted(sizes)
    assert sizes[2] < sizes[-1] and sizes[-1] == len(downlink.bytes_for(99))  # long ago, and never: the whole model


@pytest.mark.parametrize("share", [0.01, 0.1, 0.9])
def test_where_nobody_knows_what_moved_the_shortest_difference_is_sent(share: float) -> None:
    downlink = Downlink("calibrated", STEP)
    draw = np.random.default_rng(4)
    own = draw.normal(0, 0.1, SIZE).astype(np.float32)
    downlink.publish(own, 0, None)
    shelf = Shelf(2)
    shelf.received(plan_of(downlink), downlink.bytes_for(1))
    downlink.confirm(1)
    before = downlink.model
    own = own.copy()
    own[draw.permutation(SIZE)[: round(share * SIZE)]] += np.float32(5 * STEP)
    downlink.publish(own, 1, None)
    sent = downlink.bytes_for(1)
    difference = to_grid(downlink.model, STEP) - to_grid(before, STEP)
    everywhere = encode_delta(digest_of(before), (), difference)
    scattered = encode_scattered_delta(digest_of(before), difference)
    assert len(sent) == min(len(everywhere), len(scattered), len(downlink.bytes_for(2)))
    assert (sent == scattered) == (share < 0.5)
    assert shelf.received(plan_of(downlink), sent).tobytes() == downlink.model.tobytes()


def test_few_large_moves_do_not_bring_the_whole_model() -> None:
    """The length decides, not an estimate: a few outliers would make a difference look long that is short."""
    downlink = Downlink("calibrated", STEP)
    own = np.random.default_rng(1).normal(0, 0.02, SIZE).astype(np.float32)
    downlink.publish(own, 0, None)
    downlink.confirm(1)
    (mask,) = masks(1)
    own = own.copy()
    own[mask.indices()[:3]] += np.float32(1e4 * STEP)
    downlink.publish(own, 1, mask)
    assert len(downlink.bytes_for(1)) < len(downlink.bytes_for(2)) / 3


def test_sites_that_hold_the_same_share_one_object() -> None:
    downlink = Downlink("calibrated", STEP)
    downlink.publish(np.zeros(SIZE, np.float32), 0, None)
    downlink.confirm(1)
    downlink.confirm(2)
    (mask,) = masks(1)
    downlink.publish(moved(downlink.model, mask, 1), 1, mask)
    assert downlink.bytes_for(1) is downlink.bytes_for(2)
    assert downlink.bytes_for(1) is not downlink.bytes_for(3)
    assert parts_of(downlink.bytes_for(1)).index == 8
    downlink.forget(1)
    assert downlink.bytes_for(1) is downlink.bytes_for(3)


def test_from_a_model_that_has_run_away_there_is_no_difference() -> None:
    downlink = Downlink("calibrated", STEP)
    downlink.publish(np.full(SIZE, MOST_STEPS * STEP * 2, np.float32), 0, None)
    downlink.confirm(1)
    downlink.publish(np.zeros(SIZE, np.float32), 1, masks(1)[0])
    assert downlink.bytes_for(1) == downlink.bytes_for(2)
    assert Shelf(2).received(plan_of(downlink), downlink.bytes_for(1)).tobytes() == downlink.model.tobytes()


def test_a_model_that_has_run_away_travels_as_floats() -> None:
    downlink = Downlink("calibrated", STEP)
    for bad in (MOST_STEPS * STEP * 2, np.nan, np.inf):
        model = np.zeros(SIZE, np.float32)
        model[7] = bad
        downlink.publish(model, 0, None)
        assert downlink.step == 0.0
        received = Shelf(2).received(plan_of(downlink), downlink.bytes_for(0))
        assert received.tobytes() == model.tobytes()


def test_a_difference_from_eight_versions_ago_is_none() -> None:
    downlink = Downlink("calibrated", STEP)
    own = np.random.default_rng(1).normal(0, 0.1, SIZE).astype(np.float32)
    downlink.publish(own, 0, None)
    downlink.confirm(0)
    short = []
    for version, mask in enumerate(masks(9, kept=2), start=1):
        own = moved(own, mask, version)
        downlink.publish(own, version, mask)
        short.append(len(downlink.bytes_for(0)) < len(downlink.bytes_for(99)) / 2)
    assert short == [True] * 7 + [False] * 2


@pytest.mark.parametrize(("coding", "width"), [("calibrated", 1), ("f32", 4), ("f16", 2)])
def test_a_reference_goes_to_who_has_not_answered_yet(coding: ModelCoding, width: int) -> None:
    downlink = Downlink(coding, STEP)
    downlink.publish(np.random.default_rng(1).normal(0, 0.1, SIZE).astype(np.float32), 0, None)
    reference = downlink.model
    downlink.use_reference(reference)
    alone = downlink.bytes_for(0)
    assert parts_of(alone).header == 20  # it is the model itself
    downlink.confirm(1)
    downlink.publish(reference + np.float32(0.5), 1, None)
    plan = replace(plan_of(downlink), method="importance", reference_digest=downlink.reference_digest)
    data = downlink.bytes_for(0)
    _, found = unpack(data, plan, lambda digest: None)
    assert found is not None and found.tobytes() == reference.tobytes()
    assert parts_of(data).header == 20 + 12 and parts_of(data).values <= 2 * (width * SIZE + 20)
    assert parts_of(downlink.bytes_for(1)).header == 20
    downlink.use_reference(None)
    downlink.use_mask(masks(1)[0])
    assert parts_of(downlink.bytes_for(0)).header == 20 and downlink.reference_digest == ""


def test_a_reference_off_the_grid_travels_as_floats() -> None:
    downlink = Downlink("calibrated", STEP)
    reference = np.full(SIZE, STEP / 3, np.float32)
    downlink.publish(np.zeros(SIZE, np.float32), 0, None)
    downlink.use_reference(reference)
    plan = replace(plan_of(downlink), method="importance", reference_digest=downlink.reference_digest)
    _, found = unpack(downlink.bytes_for(0), plan, lambda digest: None)
    assert found is not None and found.tobytes() == reference.tobytes()
