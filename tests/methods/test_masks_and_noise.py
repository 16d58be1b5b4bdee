"""What is particular to ranked, random-step, posterior and match-noise."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from client.mechanisms import train_round
from client.mechanisms.posterior import posterior_step
from common.accounting import epsilon_of
from common.charges import Charge
from common.config import RunConfig
from common.errors import ConfigError, ModelMissing, WireError
from common.mask import MaskSpec, hold, let_go
from common.methods import METHODS
from common.models import FlatModel, build, initial_vector
from server.methods import open_policy
from server.methods.ranked import Policy, top
from server.planning import planned_history, run_noise_multiplier, sample_plan
from server.runlog import read_events
from simulations.run import Engine, simulate
from tests.support import (
    SMALL_MODEL,
    brute_force_clipped_sum,
    silent,
    site_data,
    small_config,
    small_dataset,
    small_plan,
)

DATA = small_dataset()
SIZE = 400


def ranked(tmp_path: Path, **changes: object) -> Policy:
    settings = {"method": "ranked", "rounds": 8, "rounds_per_epoch": 2, "density_schedule": "constant"}
    policy = open_policy(small_config(tmp_path, **{**settings, "final_density": 0.25, **changes}), SIZE)
    assert isinstance(policy, Policy)
    return policy


def learn(policy: Policy, number: int, update: np.ndarray, noise_std: float) -> None:
    mask = policy.mask(number)
    plan = small_plan(SIZE, mask_kept=mask.kept, mask_chosen=mask.chosen)
    policy.learn(plan, mask.indices(), update[mask.indices()].astype(np.float32), noise_std)


def test_the_largest_sums_of_the_last_epoch_are_kept(tmp_path: Path) -> None:
    policy = ranked(tmp_path)
    first = policy.mask(1)
    assert not first.chosen  # nothing to rank yet: the seed's
    update = np.random.default_rng(1).standard_normal(SIZE)
    learn(policy, 1, update, 1e-9)
    learn(policy, 2, -3 * update, 1e-9)  # the sum is ranked, not the last round
    sums = np.where(np.isin(np.arange(SIZE), first.indices()), np.abs(update - 3 * update), 0)
    # With hardly any noise the frozen ones have hardly any score: the mask stays what it was.
    assert np.array_equal(policy.mask(3).indices(), top(sums, 100))
    assert policy.mask(3) == policy.mask(4) != first


def test_frozen_coordinates_return_by_noise_of_the_scale_of_the_others(tmp_path: Path) -> None:
    policy = ranked(tmp_path)
    frozen = np.setdiff1d(np.arange(SIZE), policy.mask(1).indices())
    noise = 0.3
    for number in (1, 2):
        learn(policy, number, noise * np.random.default_rng(number).standard_normal(SIZE), noise)
    returned = np.isin(frozen, policy.mask(3).indices()).mean()
    assert returned == pytest.approx(0.25, abs=0.08)  # all scores are alike: as many as of the others
    quiet = ranked(tmp_path, seed=2)
    left = np.setdiff1d(np.arange(SIZE), quiet.mask(1).indices())
    for number in (1, 2):
        learn(quiet, number, noise * np.random.default_rng(number).standard_normal(SIZE), noise / 100)
    assert np.isin(left, quiet.mask(3).indices()).mean() < 0.05  # the near miss: too little noise, and none returns


def test_the_noise_in_the_sums_is_that_of_all_rounds_of_the_epoch(tmp_path: Path) -> None:
    policy = ranked(tmp_path)
    learn(policy, 1, np.zeros(SIZE), 0.3)
    learn(policy, 2, np.ones(SIZE), 0.4)
    assert policy.state["ranked_variance"] == pytest.approx([0.3**2 + 0.4**2])
    assert policy.state["ranked_sums"].sum() == 100
    policy.mask(3)  # a new epoch
    assert policy.state["ranked_variance"] == [0] and not policy.state["ranked_sums"].any()


def test_a_restart_finds_the_same_masks(tmp_path: Path) -> None:
    policy, update = ranked(tmp_path), np.random.default_rng(1).standard_normal(SIZE)
    learn(policy, 1, update, 0.1)
    learn(policy, 2, update, 0.1)
    saved = {name: array.copy() for name, array in policy.state.items()}  # before the new epoch has begun
    expected = policy.mask(3)
    let_go()
    again = ranked(tmp_path)
    again.state.update(saved)
    assert again.mask(3) == expected and np.array_equal(
        again.mask(3).indices(), np.flatnonzero(policy.state["ranked_kept"])
    )


def test_an_epoch_without_releases_is_followed_by_a_random_mask(tmp_path: Path) -> None:
    policy = ranked(tmp_path)
    learn(policy, 1, np.ones(SIZE), 0.1)
    assert policy.mask(3).chosen and not policy.mask(5).chosen
    assert policy.mask(5).epoch == 2


def test_a_ranked_mask_travels_once_per_epoch_to_each_site(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, name="x", method="ranked", rounds=6, rounds_per_epoch=3, sites=4, noise_multiplier=2.0, epsilon=1e4
    )
    rounds = [
        e for e in read_events(simulate(config, Engine(in_process=True)).folder / "run.jsonl") if e["event"] == "round"
    ]
    index = [event["downlink"]["index"] for event in rounds]
    assert index[:3] == [0, 0, 0]  # the first epoch is dense
    assert index[3] > index[4] == index[5] == 4 * 8
    assert index[3] <= 4 * (1 + math.ceil(131 / 8))


def test_a_chosen_mask_is_known_by_its_content_or_not_at_all() -> None:
    indices = np.array([1, 5, 7])
    mask = MaskSpec(1, 0, 10, 3, hold(indices))
    assert np.array_equal(mask.indices(), indices) and not mask.indices().flags.writeable
    assert mask.digest() != MaskSpec(1, 0, 10, 3).digest()
    with pytest.raises(ConfigError, match="does not keep 4 of 10"):
        replace(mask, kept=4).indices()
    with pytest.raises(ConfigError, match="does not keep 3 of 6"):
        replace(mask, size=6).indices()
    let_go()
    with pytest.raises(ModelMissing, match="is not held here"):
        mask.indices()


def test_a_mask_that_the_plan_does_not_name_is_refused() -> None:
    from client.site import Shelf
    from common.broadcast import digest_of, encode_floats, encode_mask

    start = np.zeros(10, np.float32)
    mask = MaskSpec(1, 0, 10, 3, hold(np.array([1, 5, 7])))
    block, model = encode_mask(mask), encode_floats(start, "f32")
    plan = small_plan(10, model_digest=digest_of(start), mask_kept=3, mask_chosen=mask.chosen)
    let_go()
    with pytest.raises(ModelMissing):
        Shelf(2).received(plan, model)
    assert Shelf(2).received(plan, block + model).size == 10
    other = MaskSpec(1, 0, 10, 3, hold(np.array([1, 5, 8])))
    for wrong, reason in (
        (encode_mask(other) + model, "expected the mask"),
        (block[:-1] + bytes([block[-1] ^ 1]) + model, "damaged on its way"),
        (block[:9], "at least 12 bytes"),
        (block + block + model, "expected a model of version"),
    ):
        with pytest.raises(WireError, match=reason):
            Shelf(2).received(plan, wrong)
    with pytest.raises(WireError, match="names none"):
        Shelf(2).received(replace(plan, mask_chosen=""), block + model)


def test_posterior_clips_before_it_masks() -> None:
    start = initial_vector(SMALL_MODEL, 3)
    model = FlatModel(build(SMALL_MODEL))
    model.load(start)
    kept = torch.arange(0, start.size, 2)
    plan = small_plan(start.size, clip_norm=0.1, method="posterior")
    inputs, targets = torch.tensor(DATA.train_inputs[:6]), torch.tensor(DATA.train_targets[:6])
    total = posterior_step(model, kept, plan, site_data(DATA.train_inputs, DATA.train_targets)).gradient_sum(
        inputs, targets
    )
    whole = brute_force_clipped_sum(model, inputs, targets, np.arange(start.size), 0.1)
    assert total.numpy() == pytest.approx(whole[::2], abs=1e-6)
    masked_first = brute_force_clipped_sum(model, inputs, targets, kept.numpy(), 0.1)
    assert np.linalg.norm(total) < 0.95 * np.linalg.norm(masked_first)  # the weaker order


def test_every_step_has_a_mask_of_its_own_and_the_union_travels(tmp_path: Path) -> None:
    config = small_config(tmp_path, method="random-step", steps_per_round=3, density_schedule="constant")
    start = initial_vector(SMALL_MODEL, 3)
    mask = open_policy(config, start.size).mask(2)
    parts = mask.parts()
    assert len(parts) == 3 and len({part.epoch for part in parts}) == 3
    union = np.unique(np.concatenate([part.indices() for part in parts]))
    assert np.array_equal(mask.indices(), union) and mask.kept == union.size > parts[0].kept
    model = FlatModel(build(SMALL_MODEL))
    model.load(start)
    plan = small_plan(
        start.size,
        method="random-step",
        steps=3,
        mask_seed=mask.seed,
        mask_epoch=mask.epoch,
        mask_kept=mask.kept,
        mask_draws=3,
        mask_drawn_kept=mask.drawn_kept,
        clip_norm=0.2,
    )
    data = site_data(DATA.train_inputs[:8], DATA.train_targets[:8])
    moved = train_round(model, data, plan, silent()).values
    model.load(start)
    for part in parts:  # by hand, one mask after the other
        kept = part.indices()
        total = brute_force_clipped_sum(model, *data.batch(np.arange(8), model.vector.device), kept, 0.2)
        model.vector[torch.tensor(kept)] -= torch.tensor(total / 8, dtype=torch.float32)
    assert moved == pytest.approx((model.vector.numpy() - start)[union], abs=1e-6)
    with pytest.raises(ConfigError, match="expected a union of"):
        replace(plan, mask_kept=mask.kept + 1).mask.indices()
    with pytest.raises(ConfigError, match="client-momentum=0"):
        small_config(tmp_path, method="random-step", client_momentum=0.5)


def match_noise(tmp_path: Path, **changes: object) -> RunConfig:
    settings = {"method": "match-noise", "rounds": 3, "steps_per_round": 10, "final_density": 0.1, "sampling_rate": 0.1}
    return small_config(tmp_path, **{**settings, **changes})


def test_matched_noise_has_the_norm_of_dense_noise_and_is_spent_on_steps(tmp_path: Path) -> None:
    config = match_noise(tmp_path)
    policy = open_policy(config, 10_000)
    plans = [sample_plan(config, policy, 1.5, number) for number in (1, 2, 3)]
    for plan in plans:
        assert plan.noise_multiplier * math.sqrt(plan.mask_kept) == pytest.approx(1.5 * math.sqrt(10_000))
    assert [plan.steps for plan in plans] == [10, 18, 100]  # floor(10 / density)
    assert [plan.charge for plan in plans] == [Charge(plan.noise_multiplier, 0.1, plan.steps) for plan in plans]


def test_matched_noise_meets_its_budget_with_more_steps_than_the_dense_run(tmp_path: Path) -> None:
    matched, dense = match_noise(tmp_path), match_noise(tmp_path, method="dense")
    noise = {config.method: run_noise_multiplier(config, open_policy(config, 10_000)) for config in (matched, dense)}
    history = planned_history(matched, open_policy(matched, 10_000), noise["match-noise"])
    assert sum(charge.steps for charge in history) == 128 > 30
    assert 0.999 * matched.epsilon < epsilon_of(history, matched.delta) <= matched.epsilon
    # About the dense run's noise where the mask is dense: what the raised noise saves pays for the steps.
    assert noise["match-noise"] == pytest.approx(noise["dense"], rel=0.1)


def test_unclipped_and_noiseless_runs_are_labelled_everywhere(tmp_path: Path) -> None:
    for name in (name for name, method in METHODS.items() if not method.private):
        config = small_config(tmp_path, method=name, rounds=1, noise_multiplier=2.0, epsilon=1e4)
        assert "not-private" in config.run_name and not config.is_private
        result = simulate(config, Engine(in_process=True))
        start, end = (
            next(e for e in read_events(result.folder / "run.jsonl") if e["event"] == k) for k in ("run", "end")
        )
        assert result.epsilon is None and start["private"] is False and start["planned_epsilon"] is None
        assert {site["epsilon"] for site in end["sites"]} == {None}
        assert (start["noise_multiplier"] > 0) == (name == "noisy-only")
        with pytest.raises(ConfigError, match="not private by itself"):
            small_config(tmp_path, method=name, private=False)
        with pytest.raises(ConfigError, match="a private method in a private plan"):
            small_plan(10, method=name)


def test_ranked_masks_protect_clients_too(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, method="ranked", privacy_unit="client", cohort=3, noise_multiplier=2.0, epsilon=1e4, grid=1.0
    )
    result = simulate(config, Engine(in_process=True))
    assert result.epsilon == epsilon_of([Charge(2.0, 0.5, config.rounds)], config.delta)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"method": "rnadom"}, "unknown method 'rnadom'"),
        ({"reference_digest": "0" * 16}, "no reference model with method random"),
        ({"method": "importance", "standardised": True}, "a reference to standardise by"),
        ({"mask_chosen": "xyz"}, "16 hexadecimal digits or none"),
        ({"steps": 3, "mask_draws": 2, "mask_drawn_kept": 2}, "one for each of 3 steps"),
    ],
)
def test_plans_that_no_method_makes_are_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        small_plan(10, **changes)


def test_gradients_are_per_record_with_and_without_torch_func() -> None:
    from client.clipping.per_record import per_record_gradients

    class Looped(torch.nn.Module):
        """A model that torch.func has no rule for."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.RNN(4, 3, batch_first=True)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs.view(-1, 3, 4))[0][:, -1]

    torch.manual_seed(1)
    inputs, targets = torch.tensor(DATA.train_inputs[:7]).double(), torch.tensor(DATA.train_targets[:7])
    for module in (build(SMALL_MODEL), Looped()):
        model = FlatModel(module, dtype=torch.float64)
        found = torch.cat(list(per_record_gradients(model, inputs, targets, 3)))
        expected = torch.stack([model.gradient(inputs[i : i + 1], targets[i : i + 1]) for i in range(7)])
        assert torch.allclose(found, expected, rtol=1e-9) and found.shape == (7, model.size)
