import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.accounting import epsilon_of
from common.charges import Charge
from common.errors import ConfigError, WireError
from common.methods import METHODS
from common.plan import RANGES, RoundPlan
from tests.support import small_plan

PLAN = small_plan(100)


@given(
    st.integers(1, 10**6),
    st.floats(1e-6, 1, exclude_min=True),
    st.floats(1e-6, 1e6),
    st.text("abc-é:", min_size=1, max_size=20),
)
def test_round_trip_to_the_bit(round_number: int, rate: float, clip_norm: float, run: str) -> None:
    plan = small_plan(100, round=round_number, sampling_rate=rate, clip_norm=clip_norm, run=run)
    assert RoundPlan.from_bytes(plan.to_bytes()) == plan


def test_mechanism_and_charge_come_from_the_same_numbers() -> None:
    assert small_plan(10, noise_multiplier=1.5, sampling_rate=0.2, steps=7).charge == Charge(1.5, 0.2, 7)
    assert small_plan(10, private=False, noise_multiplier=0.0).charge is None
    # One record replaces a site's update by another: twice the sensitivity, half the noise.
    assert small_plan(10, privacy_unit="client", noise_multiplier=1.5).charge == Charge(0.75, 1.0, 1)


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (1, 0.9), (10, 0.0), (6, 0.5)])
def test_the_noise_of_a_release_is_what_its_steps_add_up_to(steps: int, momentum: float) -> None:
    plan = small_plan(
        10, steps=steps, momentum=momentum, learning_rate=0.3, noise_multiplier=1.7, clip_norm=2.0, sampling_rate=0.25
    )
    noise = np.random.default_rng(1).normal(0, 1.7 * 2.0, (steps, 200_000))
    velocity, position = np.zeros(200_000), np.zeros(200_000)
    for step in noise:
        velocity = momentum * velocity + step
        position -= 0.3 * velocity / (0.25 * 40)
    assert plan.grid_step(declared_size=40) == pytest.approx(0.5 * position.std(), rel=0.01)


@pytest.mark.parametrize("name", RANGES)
def test_every_number_has_a_range_that_single_precision_carries(name: str) -> None:
    allowed = RANGES[name]
    kind = type(getattr(PLAN, name))
    for number in (allowed.least, allowed.most, *([0] if allowed.zero else [])):
        private = not (name == "noise_multiplier" and number == 0)
        assert getattr(small_plan(100, private=private, **{name: kind(number)}), name) == number
        assert np.isfinite(np.float32(number) ** 2 if name != "model_step" else np.float32(number))
    outside = [-1 if allowed.zero else allowed.least - 1, allowed.most + 1]
    if kind is float:
        outside = [np.nextafter(allowed.least, -1), np.nextafter(allowed.most, np.inf), np.nan, np.inf, -1.0, 1e39]
    for number in outside:
        with pytest.raises(ConfigError, match=rf"expected {name} from .*, got {name}="):
            small_plan(100, **{name: kind(number)})


def test_the_ranges_are_those_of_this_version_of_plans() -> None:
    """A site refuses what is outside: another range is another version."""
    assert {name: (allowed.least, allowed.most, allowed.zero) for name, allowed in RANGES.items()} == {
        "round": (1, 2**32 - 1, False),
        "model_version": (0, 2**32 - 1, False),
        "cohort": (1e-6, 1e9, False),
        "steps": (1, 10**6, False),
        "sampling_rate": (1e-9, 1, False),
        "clip_norm": (1e-6, 1e9, False),
        "noise_multiplier": (1e-6, 1e6, True),
        "learning_rate": (1e-9, 1e9, False),
        "momentum": (0, 0.999999, False),
        "physical_batch_size": (1, 2**24, False),
        "grid": (1 / 64, 1024, False),
        "model_step": (1e-30, 1e30, True),
        "pick_epsilon": (1e-9, 1e6, True),
        "pick_threshold": (1e-9, 1e9, True),
        "entry_bound": (1e-9, 1e9, True),
        "second_clip_norm": (1e-9, 1e9, True),
        "measurements": (1, 2**24, True),
    }


@pytest.mark.parametrize(
    "changes", [{"run": "x" * 200}, {"model": "x" * 200}, {"mask_kept": 100}, {"value_coding": "calibrated"}]
)
def test_the_longest_names_and_the_fullest_mask_travel(changes: dict[str, object]) -> None:
    plan = small_plan(100, **changes)
    assert RoundPlan.from_bytes(plan.to_bytes()) == plan


def test_a_plan_has_at_most_4096_bytes() -> None:
    data = PLAN.to_bytes()
    assert RoundPlan.from_bytes(data.ljust(4096)) == PLAN
    with pytest.raises(WireError, match="at most 4096 bytes, got 4097"):
        RoundPlan.from_bytes(data.ljust(4097))


@pytest.mark.parametrize("sampling_rate", [1e-9, 0.5, 0.999, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("noise_multiplier", [1e-6, 0.3, 1e6])
def test_every_private_plan_has_a_price(noise_multiplier: float, sampling_rate: float) -> None:
    """An accountant that raises would let a server stop a site, or tell what it holds."""
    for steps in (1, 10**6):
        plan = small_plan(10, noise_multiplier=noise_multiplier, sampling_rate=sampling_rate, steps=steps)
        assert plan.charge is not None
        assert epsilon_of((plan.charge,), 1e-5, "rdp") > 0


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if "client" not in method.units])
def test_a_plan_is_charged_by_the_unit_that_its_method_protects(method: str) -> None:
    """The charge of a client-level plan is that of one Gaussian release, whatever else a method gives away."""
    with pytest.raises(ConfigError, match=f"which method {method} protects"):
        small_plan(10, method=method, private=METHODS[method].private, privacy_unit="client", momentum=0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_multiplier": 0.0},
        {"value_coding": "f64"},
        {"value_coding": "calibrated", "private": False},
        {"index_coding": "bitmap"},
        {"privacy_unit": "person"},
        {"model_digest": "xyz"},
        {"mask_kept": 101},
        {"run": ""},
        {"run": "x" * 201},
        {"model": ""},
        {"model": "x" * 201},
        {"mask_draws": 2},
        {"mask_chosen": "xyz"},
        {"reference_digest": "0" * 16},
        {"standardised": True},
        {"select_per": "epoch"},
        {"method": "noisy-only"},
        {"method": "select-random", "second_clip_norm": 1.0, "index_coding": "seed"},
    ],
)
def test_impossible_plans_cannot_be_made(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        small_plan(100, **changes)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"not json",
        b"\xff\xfe",
        PLAN.to_bytes()[:-1],
        PLAN.to_bytes().replace(b'"v":3', b'"v":2'),
        PLAN.to_bytes().replace(b'"steps":1', b'"steps":"1"'),
        PLAN.to_bytes().replace(b'"steps":1', b'"steps":true'),
        PLAN.to_bytes().replace(b'"steps":1', b'"steps":0'),
        PLAN.to_bytes().replace(b'"steps"', b'"leaps"'),
        PLAN.to_bytes().replace(b'"clip_norm":1.0', b'"clip_norm":NaN'),
        json.dumps({**json.loads(PLAN.to_bytes()), "extra": 1}).encode(),
        b" " * 5000 + PLAN.to_bytes(),
    ],
)
def test_anything_else_from_the_wire_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        RoundPlan.from_bytes(data)
