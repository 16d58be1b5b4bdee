"""Importance: the published form breaks its promise on crafted neighbours, ours keeps it; both sides agree on alpha."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from client.mechanisms.importance import standardised_sum
from client.site import Shelf
from common.accounting import epsilon_of
from common.broadcast import digest_of
from common.charges import Charge
from common.coding import Values
from common.errors import ConfigError, ModelMissing
from common.mask import let_go
from common.methods.importance import restored, standardisation, standardised
from common.models import FlatModel, build
from common.plan import RoundPlan
from server.app import RunResult
from server.downlink import Downlink
from server.methods import open_policy
from server.methods.importance import Policy
from server.runlog import read_events
from simulations.canaries import CanaryModel
from simulations.run import Engine, simulate
from simulations.sites import SimulatedSites
from tests.support import SMALL_MODEL, small_config, small_dataset, small_plan

TRIALS, SIZE, NOISE = 2000, 40, 4.0
DELTA = 1e-5
WARM = small_config(
    Path("unused"), method="importance", rounds=2, warmup_epochs=1, first_density=0.05, final_density=0.05
)
WARM_PLAN = small_plan(SIZE, mask_kept=SIZE, method="importance")


def clipped_gradients(with_record: bool) -> np.ndarray:
    """Return the clipped sum of a warm-up step: ten records on coordinate 0; the eleventh alone on coordinate 7."""
    total = np.zeros(SIZE)
    total[0] = 10.0
    total[7] = 1.0 if with_record else 0.0
    return total


def published_mask(with_record: bool, rng: np.random.Generator) -> np.ndarray:
    """Return the top 2 of |clipped gradient| before its noise, as the published algorithm scores."""
    noisy = clipped_gradients(with_record) + NOISE * rng.standard_normal(SIZE)  # what it would have released
    assert noisy.size == SIZE
    scores = np.abs(clipped_gradients(with_record)) + 1e-9 * rng.random(SIZE)
    return np.sort(np.argsort(-scores)[:2])


def our_mask(with_record: bool, rng: np.random.Generator) -> np.ndarray:
    """Return our mask after a warm-up round that released the same gradients with noise."""
    policy = Policy(WARM, SIZE)
    released = clipped_gradients(with_record) + NOISE * rng.standard_normal(SIZE)
    policy.learn(WARM_PLAN, np.arange(SIZE), released.astype(np.float32), NOISE)
    return policy.mask(2).indices()


def epsilon_shown(hits_with: int, hits_without: int) -> float:
    """Return a lower bound on epsilon at DELTA from how often an event was seen, with 95 % confidence."""
    from scipy.stats import beta

    low = float(beta.ppf(0.025, hits_with, TRIALS - hits_with + 1)) if hits_with else 0.0
    high = float(beta.ppf(0.975, hits_without + 1, TRIALS - hits_without))
    return max(0.0, math.log(max(low - DELTA, 1e-12) / high))


def test_scores_from_gradients_without_noise_tell_that_a_record_is_in_and_ours_do_not() -> None:
    """Published: the mask, which is public, holds coordinate 7 exactly where the record is in the data."""
    rng = np.random.default_rng(1)
    claimed = epsilon_of([Charge(NOISE, 1.0, 1)], DELTA)
    shown = {}
    for form in (published_mask, our_mask):
        hits = [sum(7 in form(with_record, rng) for _ in range(TRIALS)) for with_record in (True, False)]
        shown[form] = epsilon_shown(*hits)
    assert shown[published_mask] > 3 * claimed  # proved: the claim is false
    assert shown[our_mask] < claimed  # nothing proved against it
    assert shown[published_mask] > 3 > claimed


def test_masks_of_single_records_are_private_where_noise_falls_on_all_coordinates_and_not_on_theirs_alone() -> None:
    """Published: each record keeps its own largest coordinates, and after the clip all coordinates get noise."""
    rng = np.random.default_rng(3)

    def published_sum(gradients: np.ndarray) -> np.ndarray:
        masked = np.where(np.abs(gradients) >= np.sort(np.abs(gradients))[:, -5:-4], gradients, 0.0)
        return (masked / np.maximum(1, np.linalg.norm(masked, axis=1, keepdims=True))).sum(0)

    for _ in range(100):
        gradients = rng.standard_normal((4, SIZE)) * 10.0 ** rng.integers(-2, 3, (4, 1))
        moved = np.linalg.norm(published_sum(gradients) - published_sum(gradients[:3]))
        assert moved <= 1 + 1e-12  # the sensitivity of DP-SGD

    def seen(with_record: bool, everywhere: bool) -> int:
        """Return how often the record's coordinate is not 0 in what is released."""
        total = clipped_gradients(with_record)
        return sum(
            bool((total + NOISE * rng.standard_normal(SIZE) * (everywhere | (total != 0)))[7]) for _ in range(TRIALS)
        )

    assert seen(True, everywhere=False) == TRIALS and seen(False, everywhere=False) == 0
    assert seen(True, everywhere=True) == seen(False, everywhere=True) == TRIALS


def test_all_records_share_the_mask_of_the_plan() -> None:
    """Ours keeps the coordinates of the plan, which look at no record, and needs noise there alone."""
    config = small_config(Path("unused"), method="importance", rounds=4, warmup_epochs=1)
    policy = open_policy(config, SIZE)
    policy.state["importance_scores"] = np.arange(SIZE, dtype=np.float64)
    before = policy.mask(2)
    assert before == policy.mask(2) and before.chosen  # a function of the server's released state alone
    kept = torch.tensor(before.indices())
    model = FlatModel(CanaryModel(SIZE))
    plan = small_plan(SIZE, clip_norm=1.0)
    zeros, ones = torch.zeros(kept.numel()), torch.ones(kept.numel())
    for record in (int(kept[0]), next(i for i in range(SIZE) if i not in set(kept.tolist()))):
        total = standardised_sum(model, kept, plan, zeros, ones, torch.tensor([[float(record)]]), torch.zeros(1))
        assert total.shape == kept.shape and bool(total.any()) == (record in kept.tolist())


@pytest.mark.parametrize("scale", [0.01, 1e4])
def test_standardised_gradients_are_clipped_after_they_are_standardised(scale: float) -> None:
    rng = np.random.default_rng(2)
    model = FlatModel(build(SMALL_MODEL))
    size = model.size
    kept = torch.arange(0, size, 3)
    centre = torch.tensor(rng.standard_normal(kept.numel()), dtype=torch.float32)
    spread = torch.tensor(0.5 + rng.random(kept.numel()), dtype=torch.float32)
    data = small_dataset()
    inputs, targets = torch.tensor(data.train_inputs[:9] * scale), torch.tensor(data.train_targets[:9])
    plan = small_plan(size, clip_norm=0.3, physical_batch_size=4)
    expected = np.zeros(kept.numel())
    for record, target in zip(inputs, targets, strict=True):
        gradient = model.gradient(record[None], target[None])[kept].double().numpy()
        vector = (gradient - centre.numpy()) / spread.numpy()
        expected += vector * min(1, 0.3 / np.linalg.norm(vector))
    total = standardised_sum(model, kept, plan, centre, spread, inputs, targets)
    assert total.numpy() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    nothing = standardised_sum(model, kept, plan, centre, spread, inputs[:0], targets[:0])
    assert not nothing.any()  # an empty batch is a step like any other
    bad = standardised_sum(model, kept, plan, centre, spread, inputs[:1] * torch.nan, targets[:1])
    assert not bad.any()


def plan_after(rounds: int, **changes: object) -> RoundPlan:
    return small_plan(
        60, round=rounds + 1, steps=3, learning_rate=0.25, reference_digest="0" * 16, method="importance", **changes
    )


def test_alpha_is_the_mean_released_gradient_and_restoring_undoes_standardising() -> None:
    rng = np.random.default_rng(1)
    reference = rng.standard_normal(60).astype(np.float32)
    gradients = rng.standard_normal((12, 60)) * np.linspace(0.1, 3, 60)  # of 4 rounds of 3 steps
    model = (reference - 0.25 * gradients.sum(0)).astype(np.float32)
    alpha, spread = standardisation(model, reference, plan_after(4))
    assert alpha == pytest.approx(gradients.mean(0), abs=1e-4)
    assert np.mean(spread.astype(np.float64) ** 2) == pytest.approx(1)
    assert spread.min() >= math.sqrt(0.5) - 1e-6 and np.corrcoef(spread, np.abs(alpha))[0, 1] > 0.9
    plan = plan_after(4, momentum=0.5)
    moved = rng.standard_normal(60).astype(np.float32)
    assert restored(standardised(moved, alpha, spread, plan), alpha, spread, plan) == pytest.approx(moved, abs=1e-5)


@pytest.mark.parametrize("way", [0.0, 1e-38, 1e38])
def test_a_way_that_says_nothing_leaves_gradients_as_they_are(way: float) -> None:
    reference = np.zeros(60, np.float32)
    alpha, spread = standardisation(reference + np.float32(way), reference, plan_after(4))
    assert np.isfinite(alpha).all() and np.isfinite(spread).all() and (spread > 0).all()
    alpha, spread = standardisation(reference, reference, plan_after(0))
    assert not alpha.any() and (spread == 1).all()


@pytest.mark.parametrize(("way", "says"), [(0.9e30, True), (1.2e30, False), (1.2e-30, True), (0.9e-30, False)])
def test_ways_too_long_or_too_short_say_nothing(way: float, says: bool) -> None:
    alpha, _ = standardisation(np.full(60, way, np.float32), np.zeros(60, np.float32), plan_after(4))
    assert bool(alpha.any()) is says


def run_of(tmp_path: Path, **changes: object) -> RunResult:
    settings = {"name": "x", "method": "importance", "rounds": 8, "warmup_epochs": 2, "first_density": 0.2}
    config = small_config(
        tmp_path, **{**settings, "final_density": 0.8, "noise_multiplier": 1.5, "epsilon": 1e4, **changes}
    )
    return simulate(config, Engine(in_process=True))


def test_the_warm_up_is_dense_and_paid_for_and_masks_grow_after_it(tmp_path: Path) -> None:
    rounds = [event for event in read_events(run_of(tmp_path).folder / "run.jsonl") if event["event"] == "round"]
    densities = [event["density"] for event in rounds]
    assert densities[:2] == [1.0, 1.0] and densities[2] == pytest.approx(0.2, abs=0.01)
    assert densities[2:] == sorted(densities[2:]) and densities[-1] == pytest.approx(0.8, abs=0.01)
    epsilons = [event["epsilon"] for event in rounds]
    assert epsilons[0] > 0 and epsilons[1] == epsilon_of([Charge(1.5, 0.5, 6)], DELTA)


def test_later_masks_contain_earlier_ones_and_travel_once_per_epoch(tmp_path: Path) -> None:
    config = small_config(tmp_path, method="importance", rounds=8, rounds_per_epoch=2, warmup_epochs=1)
    policy = open_policy(config, 500)
    policy.state["importance_scores"] = np.random.default_rng(1).random(500)
    masks = [policy.mask(number) for number in range(3, 9)]
    for earlier, later in pairwise(masks):
        assert set(earlier.indices()) <= set(later.indices())
    assert masks[0].chosen == masks[1].chosen != masks[2].chosen
    result = run_of(tmp_path, rounds=6, rounds_per_epoch=3, warmup_epochs=1, sites=3)
    rounds = [event for event in read_events(result.folder / "run.jsonl") if event["event"] == "round"]
    index = [event["downlink"]["index"] for event in rounds]
    assert index[3] > index[4] == index[5] == 3 * 8  # the mask itself, then its digest alone


def test_sites_that_come_and_go_are_sent_what_they_lack_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the sites a round, and every process restarts between rounds: each reply is still admitted."""
    whole = run_of(tmp_path / "whole", cohort=3)
    site = SimulatedSites.site

    def forgetful(self: SimulatedSites, number: int) -> object:
        self._workbench.shelf.clear()
        let_go()
        return site(self, number)

    monkeypatch.setattr(SimulatedSites, "site", forgetful)
    again = run_of(tmp_path / "again", cohort=3)
    assert again.model.tobytes() == whole.model.tobytes()
    events = [event for event in read_events(again.folder / "run.jsonl") if event["event"] == "round"]
    assert [event["admitted"] for event in events] == [3] * 8


def test_a_late_joiner_gets_the_reference_once() -> None:
    rng = np.random.default_rng(1)
    downlink = Downlink("calibrated", 0.01)
    first: Values = rng.standard_normal(200).astype(np.float32)
    downlink.publish(first, 0, None)
    reference = downlink.model
    downlink.use_reference(reference)
    shelves = {0: Shelf(3), 1: Shelf(3)}

    def ask(site: int, version: int) -> int:
        plan = small_plan(
            200,
            model_version=version,
            model_digest=downlink.digest,
            model_step=downlink.step,
            reference_digest=downlink.reference_digest,
            method="importance",
        )
        downlink.use_mask(plan.mask)
        data = downlink.bytes_for(site)
        model = shelves[site].received(plan, data)
        assert digest_of(model) == downlink.digest
        held = shelves[site].get(plan.reference_digest)
        assert held is not None and np.array_equal(held, reference)
        downlink.confirm(site)
        return len(data)

    ask(0, 0)
    sizes: dict[int, list[int]] = {0: [], 1: []}
    for version in range(1, 12):
        moved = downlink.model + (0.02 * rng.standard_normal(200)).astype(np.float32)
        downlink.publish(moved, version, None)
        sizes[0].append(ask(0, version))
        if version >= 10:
            sizes[1].append(ask(1, version))
    assert sizes[1][0] > 1.5 * max(sizes[0]) and sizes[1][1] <= max(sizes[0])
    shelves[0].clear()
    with pytest.raises(ModelMissing):
        ask(0, 11)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"warmup_epochs": 0}, "at least one of the 4 epochs for its warm-up"),
        ({"warmup_epochs": 4}, "at least one of the 4 epochs for its warm-up"),
        ({"first_density": 0.9}, "first-density <= final-density"),
        ({"private": False}, "works on released noisy updates"),
        ({"privacy_unit": "client"}, "protects a record, got privacy-unit='client'"),
    ],
)
def test_what_importance_cannot_do_is_refused(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        small_config(tmp_path, method="importance", **changes)
