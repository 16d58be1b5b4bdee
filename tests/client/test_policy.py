import math
import sys
from pathlib import Path

import pytest

from client.policy import SitePolicy
from common.accounting import epsilon_of
from common.charges import Charge
from common.errors import ConfigError, PlanRefused
from tests.support import SMALL_MODEL, small_plan

LIMITS = {
    "epsilon": 8.0,
    "delta": 1e-5,
    "models": [SMALL_MODEL],
    "min-noise-multiplier": 0.8,
    "max-clip-norm": 2.0,
    "max-sampling-rate": 0.2,
    "max-steps-per-round": 20,
    "max-rounds": 50,
    "value-codings": ["calibrated", "f32"],
    "index-codings": ["seed"],
    "methods": ["dense", "random"],
}
GOOD = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 10, "round": 5}


def test_a_plan_inside_the_policy_passes() -> None:
    SitePolicy.parse(LIMITS).check(small_plan(10, **GOOD), ())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"private": False}, "not private"),
        ({"model": "dp-cnn"}, "model 'dp-cnn' is outside this site's policy: models are mlp"),
        ({"noise_multiplier": 0.79}, "noise multiplier 0.79 .* at least 0.8"),
        ({"clip_norm": 2.1}, "clip norm 2.1 .* at most 2"),
        ({"sampling_rate": 0.21}, "sampling rate 0.21 .* at most 0.2"),
        ({"steps": 21}, "21 steps .* at most 20"),
        ({"value_coding": "int8"}, "value coding int8"),
        ({"index_coding": "raw"}, "index coding raw"),
        ({"method": "ranked"}, "method ranked .* one of dense, random"),
        ({"method": "clip-only", "private": False}, "not private .its method is clip-only."),
    ],
)
def test_a_plan_outside_the_policy_is_refused_with_the_reason(change: dict[str, object], reason: str) -> None:
    with pytest.raises(PlanRefused, match=reason):
        SitePolicy.parse(LIMITS).check(small_plan(10, **{**GOOD, **change}), ())


def test_rounds_are_counted_over_all_runs_whatever_their_number() -> None:
    policy = SitePolicy.parse(LIMITS)
    policy.check(small_plan(10, **{**GOOD, "round": 999}), (), rounds=49)
    with pytest.raises(PlanRefused, match=r"round 1 .* at most 50 rounds over all runs"):
        policy.check(small_plan(10, **{**GOOD, "round": 1}), (), rounds=50)


def test_by_default_nothing_finer_than_the_noise_leaves_a_site() -> None:
    limits = {key: value for key, value in LIMITS.items() if key != "value-codings"}
    SitePolicy.parse(limits).check(small_plan(10, **GOOD, value_coding="calibrated"), ())
    with pytest.raises(PlanRefused, match=r"value coding f32 .* one of calibrated"):
        SitePolicy.parse(limits).check(small_plan(10, **GOOD, value_coding="f32"), ())


def test_what_an_operator_does_not_say_is_allowed_so_far() -> None:
    policy = SitePolicy.parse({"epsilon": 8.0, "delta": 1e-5, "models": [SMALL_MODEL]})
    assert (policy.min_noise_multiplier, policy.max_clip_norm, policy.max_sampling_rate) == (0.3, math.inf, 1.0)
    assert (policy.max_steps_per_round, policy.max_rounds) == (10_000, 100_000)
    assert (policy.privacy_units, policy.value_codings, policy.server_key) == (("record",), ("calibrated",), "")
    SitePolicy.parse({**LIMITS, "max-rounds": 1}).check(small_plan(10, **GOOD), ())


def test_the_budget_is_that_of_everything_ever_charged() -> None:
    policy, plan = SitePolicy.parse(LIMITS), small_plan(10, **GOOD)
    steps = 0
    while epsilon_of((Charge(1.0, 0.1, steps + 10),), 1e-5) <= 8.0:
        policy.check(plan, (Charge(1.0, 0.1, steps),))
        steps += 10
    assert steps > 0
    with pytest.raises(
        PlanRefused, match=r"would bring epsilon to 8\.\d+, above this site's budget of 8 \(spent so far"
    ):
        policy.check(plan, (Charge(1.0, 0.1, steps),))
    with pytest.raises(PlanRefused, match="budget"):
        policy.check(plan, (Charge(0.9, 0.1, steps),))


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("noise_multiplier", 0.8, math.nextafter(0.8, 0)),
        ("clip_norm", 2.0, math.nextafter(2, 3)),
        ("sampling_rate", 0.2, math.nextafter(0.2, 1)),
        ("steps", 20, 21),
    ],
)
def test_a_plan_at_a_limit_passes_and_one_beyond_it_does_not(field: str, inside: float, outside: float) -> None:
    policy = SitePolicy.parse({**LIMITS, "epsilon": 1e9})
    policy.check(small_plan(10, **{**GOOD, field: inside}), ())
    with pytest.raises(PlanRefused, match=r"outside this site's policy: at (least|most)"):
        policy.check(small_plan(10, **{**GOOD, field: outside}), ())


def test_a_budget_can_be_spent_to_the_last_bit() -> None:
    plan = small_plan(10, **GOOD)
    assert plan.charge is not None
    spent = epsilon_of((plan.charge,), 1e-5)
    SitePolicy.parse({**LIMITS, "epsilon": spent}).check(plan, ())
    with pytest.raises(PlanRefused, match="above this site's budget"):
        SitePolicy.parse({**LIMITS, "epsilon": math.nextafter(spent, 0)}).check(plan, ())


LEAST = math.ulp(0.0)


@pytest.mark.parametrize(
    ("key", "inside", "outside"),
    [
        ("epsilon", LEAST, 0.0),
        ("epsilon", sys.float_info.max, math.inf),
        ("epsilon", 1.0, math.nan),
        ("delta", LEAST, 0.0),
        ("delta", math.nextafter(1, 0), 1.0),
        ("min-noise-multiplier", LEAST, 0.0),
        ("min-noise-multiplier", 1.0, math.nan),
        ("max-clip-norm", LEAST, 0.0),
        ("max-clip-norm", math.inf, math.nan),
        ("max-sampling-rate", LEAST, 0.0),
        ("max-sampling-rate", 1.0, math.nextafter(1, 2)),
        ("max-steps-per-round", 1, 0),
        ("max-rounds", 1, 0),
        ("models", ["x"], []),
        ("methods", ["dense"], ["dense", "clip-only"]),
        ("privacy-units", ["record", "client"], ["person"]),
        ("index-codings", ["raw"], ["bitmap"]),
        ("server-key", "0a" * 32, "0a" * 32 + "0"),
        ("server-key", "", "0A" * 32),
    ],
)
def test_the_last_limit_that_is_allowed_and_the_first_that_is_not(key: str, inside: object, outside: object) -> None:
    SitePolicy.parse({**LIMITS, key: inside})
    with pytest.raises(ConfigError, match=f"policy: expected .*, got {key}="):
        SitePolicy.parse({**LIMITS, key: outside})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0}, "a finite epsilon > 0, got epsilon=0"),
        ({"epsilon": "3"}, "expected epsilon of type float, got '3'"),
        ({"delta": 1.0}, "0 < delta < 1"),
        ({"models": []}, "names of the models"),
        ({"models": "mlp"}, "list of names"),
        ({"max-steps-per-round": 1.5}, "type int, got 1.5"),
        ({"max-rounds": True}, "type int, got True"),
        ({"value-codings": ["f64"]}, "some of"),
        ({"server-key": "abc"}, "64 hexadecimal digits"),
        ({"accountant": "guess"}, "one of"),
        ({"max-noise": 1.0}, "unknown key 'max-noise'; the keys are epsilon"),
    ],
)
def test_a_wrong_policy_is_an_error_that_names_the_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SitePolicy.parse({**LIMITS, **change})


def test_a_policy_is_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('epsilon = 8\ndelta = 1e-6\nmodels = ["dp-cnn-s"]\n')
    assert SitePolicy.load(path) == SitePolicy(epsilon=8.0, delta=1e-6, models=("dp-cnn-s",))
    path.write_text("epsilon = 8\n")
    with pytest.raises(ConfigError, match=r"site.toml: policy: lacks delta, models"):
        SitePolicy.load(path)
    path.write_text("epsilon == 8\n")
    with pytest.raises(ConfigError, match="cannot read the policy"):
        SitePolicy.load(path)
    with pytest.raises(ConfigError, match="cannot read the policy"):
        SitePolicy.load(tmp_path / "none.toml")
