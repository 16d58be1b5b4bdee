"""Where the privacy unit is the client: sites clip, the server adds the noise."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from client.app import app
from client.dpsgd import train_round
from client.site import Site, Workbench
from common.accounting import epsilon_of
from common.broadcast import digest_of, encode_floats
from common.charges import Charge
from common.coding import clipped, decode, rounded_at_random
from common.errors import ConfigError
from common.models import FlatModel, build, initial_vector
from common.randomness import SecureRandomness
from server.aggregate import noisy_mean
from server.app import run as run_server
from server.federation import Member, draw_secret_cohort
from server.runlog import Event, read_events
from simulations import sites
from simulations.grid import InProcessGrid
from simulations.run import Engine, simulate
from simulations.seeded import SeededRandomness
from tests.support import SMALL_MODEL, silent, site_data, small_config, small_dataset, small_plan

DATA = small_dataset()
WIDE = "mlp:12-200-3"
START = initial_vector(SMALL_MODEL, 3)
ANYTHING = hnp.arrays(
    np.float32, 7, elements=st.one_of(st.floats(-3, 3, width=32), st.sampled_from([1e38, np.inf, np.nan]))
)


def release(clip_norm: float, learning_rate: float = 1.0) -> np.ndarray:
    model = FlatModel(build(SMALL_MODEL))
    model.load(START)
    plan = small_plan(
        START.size, privacy_unit="client", clip_norm=clip_norm, learning_rate=learning_rate, steps=3, cohort=4.0
    )
    return train_round(model, site_data(DATA.train_inputs, DATA.train_targets), plan, silent())


def test_the_whole_masked_update_is_clipped() -> None:
    free = release(1e9)
    norm = np.linalg.norm(free)
    assert release(norm * 2) == pytest.approx(free)
    assert release(norm / 4) == pytest.approx(free / 4, rel=1e-4, abs=1e-7)
    assert np.linalg.norm(release(norm / 4)) <= norm / 4 * (1 + 1e-6)


def test_an_update_that_has_run_away_says_nothing() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        assert clipped(np.array([0.1, bad], np.float32), 1.0).tolist() == [0, 0]


@given(st.lists(ANYTHING, max_size=4), ANYTHING)
def test_one_site_changes_the_sum_by_at_most_the_clip_norm(others: list[np.ndarray], one: np.ndarray) -> None:
    def total(updates: Iterable[np.ndarray]) -> np.ndarray:
        return 10 * noisy_mean(list(updates), 7, 0.5, 1.0, 10.0, silent()).astype(np.float64)

    assert np.linalg.norm(total([*others, one]) - total(others)) <= 0.5 * (1 + 1e-5)


def test_rounding_at_random_has_the_mean_of_the_value_and_little_variance() -> None:
    uniforms = np.random.default_rng(1).random((2, 100_000))
    for value in (0.1, -0.3, 0.5, 2.0, 0.0):
        for draws in uniforms:
            rounded = rounded_at_random(np.full(draws.size, value * 0.25, np.float32), 0.25, draws) / 0.25
            assert set(np.unique(rounded)) <= {np.floor(value), np.ceil(value)}
            # The mean of 100,000 has a std of at most 0.5 / sqrt(100,000) = 0.0016; the nearest multiple is off by 0.1.
            assert rounded.mean() == pytest.approx(value, abs=0.008)
    assert np.isnan(rounded_at_random(np.array([np.nan, 1], np.float32), 0.5, np.array([0.5, 0.5]))).tolist() == [
        True,
        False,
    ]


def test_noise_of_the_server_is_secret_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    """Flower's own engine simulates sites, but the server draws as in a deployment."""
    config = small_config(tmp_path, privacy_unit="client", cohort=3, rounds=1)
    sites.provide(sites.SimulatedSites.of(config, config.sites))
    folder = run_server(InProcessGrid(app, config.sites, config.to_mapping()), config).folder
    assert events_of(folder, "run")[0]["seeded_noise"] is False


def test_the_grid_is_of_the_smaller_of_noise_share_and_movement() -> None:
    def step(noise_multiplier: float, cohort: float) -> float:
        return small_plan(
            200, privacy_unit="client", clip_norm=2.0, noise_multiplier=noise_multiplier, cohort=cohort, grid=0.25
        ).grid_step(1)

    assert step(5.0, 4.0) == pytest.approx(0.25 * 2.0 / 10)  # 100 kept
    assert step(0.02, 4.0) == pytest.approx(0.25 * 2.0 * 0.01)


def test_coarser_grids_are_refused_where_uploads_carry_no_noise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at most 1 where the privacy unit is the client.*grid=1\.01"):
        small_config(tmp_path, privacy_unit="client", grid=1.01)
    small_config(tmp_path, privacy_unit="client", grid=1.0)
    small_config(tmp_path, privacy_unit="client", grid=2.0, value_coding="f32")


@pytest.mark.parametrize(("grid", "kept_length"), [(0.5, 0.98), (1.0, 0.926)])
def test_what_the_server_averages_points_where_the_site_moved(grid: float, kept_length: float) -> None:
    """Its clip makes up for the rounding: a movement is a little shorter, and turned nowhere on average."""
    rng = np.random.default_rng(2)
    movement = rng.standard_normal(5000)
    movement = (movement / np.linalg.norm(movement)).astype(np.float32)
    step = grid / np.sqrt(movement.size)
    rounded = [rounded_at_random(movement, step, rng.random(movement.size)) for _ in range(400)]
    mean = noisy_mean(rounded, movement.size, 1.0, 0.0, 400.0, silent())
    assert mean @ movement == pytest.approx(kept_length, abs=0.01)
    assert np.linalg.norm(mean - (mean @ movement) * movement) < 0.05


@pytest.mark.parametrize("cohort", [1.0, 100.0])
def test_a_calibrated_release_is_the_movement_but_for_a_small_unbiased_error(cohort: float) -> None:
    """No noise hides it yet: to the nearest multiple of the noise's size it would be all zeros."""
    data, start = site_data(DATA.train_inputs, DATA.train_targets), initial_vector(WIDE, 3)
    total, exact, rounds = np.zeros(start.size // 2), np.zeros(start.size // 2), 40
    for number in range(1, rounds + 1):
        released = []
        for value_coding in ("calibrated", "f32"):
            plan = small_plan(
                start.size,
                round=number,
                model=WIDE,
                model_digest=digest_of(start),
                privacy_unit="client",
                cohort=cohort,
                noise_multiplier=5.0,
                value_coding=value_coding,
            )
            site = Site(data, SeededRandomness(1, 0), Workbench("cpu"))
            reply = site.train(plan.to_bytes(), encode_floats(start, "f32"))
            step = plan.grid_step(site.declared_size)
            update = decode(
                reply, size=start.size, max_kept=plan.mask.kept, value_coding=plan.value_coding, grid_step=step
            )
            released.append(update.values)
        calibrated, plain = released
        assert np.linalg.norm(calibrated - plain) < 0.25  # of a clip norm of 1
        assert np.abs(calibrated - plain).max() <= step
        total += calibrated
        exact += plain
    # The mean of 40 rounds is nearer than any one of them: the errors are independent and have mean zero.
    assert np.linalg.norm(exact) / rounds > 0.5
    assert np.linalg.norm(total - exact) / rounds < 0.25 / np.sqrt(rounds) * 1.5


def test_the_server_adds_the_promised_noise_even_to_an_empty_round() -> None:
    mean = noisy_mean([], 1_000_000, 2.0, 3.0, 10.0, SecureRandomness.fresh())
    assert mean.std() == pytest.approx(0.3, rel=0.005)


def test_cohorts_are_drawn_independently_and_in_secret() -> None:
    members = [Member(site, site, 10, simulated=True) for site in range(50)]
    randomness = SecureRandomness.fresh()
    drawn = np.zeros((2000, 50))
    for row in drawn:
        row[[member.site for member in draw_secret_cohort(members, 0.2, randomness)]] = 1
    assert np.abs(drawn.mean(0) - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / 2000)
    assert drawn.sum(1).var() == pytest.approx(50 * 0.2 * 0.8, rel=0.2)  # a fixed size would have variance 0


def events_of(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_events(folder / "run.jsonl") if event["event"] == kind]


def test_a_run_accounts_every_site_for_every_round_and_names_the_unit(tmp_path: Path) -> None:
    config = small_config(tmp_path, privacy_unit="client", cohort=3, rounds=5, clip_norm=0.5)
    result = simulate(config, Engine(in_process=True))
    (start,), (end,) = events_of(result.folder, "run"), events_of(result.folder, "end")
    assert start["privacy_unit"] == "client" and "site" in start["neighbours"]
    assert start["seeded_noise"] is True and start["declared_sizes"] == [], "the sizes of sites are private too"
    expected = epsilon_of((Charge(start["noise_multiplier"], 0.5, 5),), config.delta)
    assert {row["epsilon"] for row in end["sites"]} == {expected} and 7.9 < expected <= 8
    assert len({len(event["cohort"]) for event in events_of(result.folder, "round")}) > 1  # Poisson
    again = simulate(
        small_config(tmp_path, privacy_unit="client", cohort=3, rounds=5, clip_norm=0.5), Engine(in_process=True)
    )
    assert again.model.tobytes() == result.model.tobytes()


def test_the_mask_comes_before_the_clip(tmp_path: Path) -> None:
    """A sparser update is clipped less: its norm is what the mask leaves."""
    sparse = small_plan(START.size, privacy_unit="client", clip_norm=1e9, mask_kept=START.size // 4)
    model = FlatModel(build(SMALL_MODEL))
    model.load(START)
    moved = train_round(model, site_data(DATA.train_inputs, DATA.train_targets), sparse, silent())
    off = np.setdiff1d(np.arange(START.size), sparse.mask.indices())
    assert moved.shape == (START.size // 4,)
    assert torch.equal(model.vector[torch.tensor(off)], torch.tensor(START[off]))
    assert clipped(moved, float(np.linalg.norm(moved)) * 1.0001) is moved


def test_weights_by_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="uniform"):
        small_config(tmp_path, privacy_unit="client", weighting="size")
