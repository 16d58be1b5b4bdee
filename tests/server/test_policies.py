"""What a server makes of admitted updates, method by method."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.compressive import enough_rows
from common.methods import compressive
from server.admission import AdmittedUpdate
from server.federation import Member
from server.methods import open_policy
from server.methods.policy import MethodPolicy, scattered_mean
from server.methods.ranked import public_normals, top
from server.strategy import SparseDpStrategy
from tests.support import small_config, small_plan

SIZE = 60
PUBLIC = [-0.5547891556928248, -0.7277621329294252, 0.310487203751186]


def policy_of(method: str, **changes: Any) -> MethodPolicy:
    settings = {"density_schedule": "constant", "final_density": 0.1, "seed": 1}
    return open_policy(small_config(Path("unused"), method=method, **{**settings, **changes}), SIZE)


def update(values: list[float], indices: list[int] | None = None) -> AdmittedUpdate:
    where = None if indices is None else np.array(indices)
    return AdmittedUpdate(np.array(values, np.float32), None, where)  # type: ignore[arg-type]


def test_a_coordinate_that_a_site_did_not_choose_is_a_zero_of_its_own() -> None:
    updates = [(update([1.0, 2.0], [3, 7]), 1.0), (update([4.0], [7]), 3.0), (update([9.0]), 1.0)]
    union, mean = policy_of("select-random", index_coding="compact").combine(small_plan(SIZE), updates, np.zeros(SIZE))
    assert union.tolist() == [3, 7] and mean.tolist() == [0.25, (2 + 12) / 4]
    union, mean = scattered_mean([(np.array([5]), np.array([1e8], np.float32), 1.0)] * 3, SIZE)
    assert union.tolist() == [5] and mean.dtype == np.float32 and mean[0] == 1e8


def test_a_recovered_gradient_is_followed_by_steps_that_shrink() -> None:
    policy = policy_of("compressive", steps_per_round=1, entry_bound=0.5)
    plan = small_plan(SIZE, method="compressive", mask_kept=3, entry_bound=0.5, learning_rate=0.2, round=4)
    measurement = compressive.METHOD.measurement(plan)
    assert measurement.rows == enough_rows(SIZE, 3)
    support, entries = np.array([4, 20, 41]), np.array([1.0, -2.0, 0.5])
    measured = AdmittedUpdate(measurement.of(support, entries).astype(np.float32), None)  # type: ignore[arg-type]
    indices, step = policy.combine(plan, [(measured, 1.0), (measured, 2.0)], np.zeros(SIZE))
    assert indices.tolist() == support.tolist()
    assert step == pytest.approx(-0.2 / 2 * entries * 2 * 0.5 * 3, rel=1e-4)


def test_the_warm_up_alone_is_scored() -> None:
    policy = policy_of("importance", rounds=8, warmup_epochs=2, first_density=0.05)
    policy.begin(np.zeros(SIZE, np.float32))
    assert policy.mask(3).kept == 3 and not policy.mask(3).chosen  # nothing to rank: the seed's
    plan = small_plan(SIZE, method="importance", reference_digest="1" * 16)
    for values in ([1.0, -5.0], [-3.0, 1.0]):
        policy.learn(plan, np.array([2, 9]), np.array(values, np.float32), 0.1)
    later = small_plan(SIZE, method="importance", reference_digest="1" * 16, standardised=True)
    policy.learn(later, np.array([30]), np.array([100.0], np.float32), 0.1)
    scores = policy.state["importance_scores"]
    assert scores[[2, 9]].tolist() == [4.0, 6.0] and scores.sum() == 10
    mask = policy.mask(3)
    assert mask.kept == 3 and {2, 9} <= set(mask.indices().tolist())
    assert mask.chosen and policy.mask(1).kept == SIZE and not policy.mask(1).chosen


def test_every_step_of_every_round_has_draws_of_its_own() -> None:
    policy = policy_of("random-step", steps_per_round=3)
    masks = [policy.mask(number) for number in (1, 2)]
    assert [(mask.epoch, mask.draws, mask.drawn_kept) for mask in masks] == [(0, 3, 6), (3, 3, 6)]
    assert [policy.kept(number) for number in (1, 2)] == [mask.indices().size for mask in masks]


def test_the_largest_come_first_and_of_equal_ones_the_earlier() -> None:
    assert top(np.array([1.0, 3.0, 3.0, 2.0, 3.0]), 2).tolist() == [1, 2]


def test_public_numbers_are_the_same_on_every_machine() -> None:
    assert public_normals(b"ranked", 1, 2, 3) == pytest.approx(PUBLIC, abs=1e-12)


@pytest.mark.parametrize(("weighting", "weight"), [("size", 40.0), ("uniform", 1.0)])
def test_sites_count_alike_or_by_their_size(weighting: str, weight: float) -> None:
    strategy: Any = SimpleNamespace(_config=SimpleNamespace(weighting=weighting))
    assert SparseDpStrategy._weight(strategy, Member(1, 2, 40, simulated=True)) == weight
