import dataclasses
import math
import sys
from typing import Any

import pytest

from common.config import _PLANNED, RunConfig, describe_keys, key_of, parse_assignment
from common.errors import ConfigError
from common.plan import RANGES
from simulations.run import config_with, defaults


def test_pyproject_has_a_default_for_every_key_and_for_nothing_else() -> None:
    assert defaults().keys() == {key_of(f.name) for f in dataclasses.fields(RunConfig)}
    assert RunConfig.parse(defaults()).to_mapping() == defaults()


def test_the_defaults_are_the_demo() -> None:
    config = config_with({})
    assert (config.sites, config.rounds, config.steps_per_round, config.sampling_rate) == (10, 20, 10, 0.1)
    assert (config.epsilon, config.delta, config.clip_norm, config.learning_rate) == (8.0, 1e-5, 1.0, 4.0)
    assert (config.final_density, config.density_schedule, config.dataset) == (0.3, "cooling", "fashion-mnist-12k")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final-densty": 0.3}, "did you mean 'final-density'"),
        ({"final_density": 0.3}, "did you mean 'final-density'"),
        ({"frobnicate": 1}, "unknown run-config key 'frobnicate'; the keys are"),
        ({"rounds": "20"}, "rounds of type int, got '20'"),
        ({"rounds": True}, "rounds of type int, got True"),
        ({"private": 1}, "private of type bool, got 1"),
        ({"rounds": 0}, "at least 1, got rounds=0"),
        ({"epsilon": -1.0}, "above 0, got epsilon=-1.0"),
        ({"epsilon": float("inf")}, "finite"),
        ({"delta": 1.0}, "0 < delta < 1, got delta=1.0"),
        ({"sampling-rate": 1.5}, "sampling-rate=1.5"),
        ({"final-density": 0.0}, "final-density=0.0"),
        ({"client-momentum": 1.0}, "client-momentum=1.0"),
        ({"server-momentum": -0.1}, "server-momentum=-0.1"),
        ({"seed": -1}, "seed=-1"),
        ({"cohort": 11}, "at most the 10 sites, got cohort=11"),
        ({"min-cohort": 11}, "at most the cohort of 10, got min-cohort=11"),
        ({"value-coding": "f64"}, "one of f32, f16, int8, calibrated, got 'f64'"),
        ({"server-optimizer": "lion"}, "one of sgd, momentum, adam"),
        ({"name": "../up"}, "without '/'"),
        ({"noise-multiplier": -1.0}, "noise-multiplier=-1.0"),
    ],
)
def test_bad_values_are_named_with_what_was_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_with(changes)


LEAST, MOST = math.ulp(0.0), sys.float_info.max
BELOW_ONE, ABOVE_ONE = math.nextafter(1, 0), math.nextafter(1, 2)
CLIENT = {"privacy-unit": "client"}


@pytest.mark.parametrize(
    ("key", "inside", "outside", "others"),
    [
        *((key, 1, 0, {}) for key in ("rounds", "sites", "min-cohort", "rounds-per-epoch")),
        *((key, 0, -1, {}) for key in ("cohort", "cooling-epochs", "warmup-epochs", "evaluate-every", "seed")),
        *(
            (key, *pair, {})
            for key in ("epsilon", "server-learning-rate", "round-deadline", "downlink-grid")
            for pair in ((LEAST, 0.0), (MOST, math.inf), (MOST, math.nan))
        ),
        *((key, 0.0, -LEAST, {}) for key in ("server-momentum", "server-averaging", "noise-multiplier")),
        *((key, BELOW_ONE, 1.0, {}) for key in ("server-momentum", "server-averaging", "delta")),
        *((key, LEAST, 0.0, {}) for key in ("final-density", "first-density", "delta")),
        *((key, 1.0, ABOVE_ONE, {}) for key in ("final-density", "first-density")),
        *((key, 1e-9, 0.0, {}) for key in ("pick-epsilon", "entry-bound")),
        *((key, 0.0, -LEAST, {}) for key in ("pick-threshold", "second-clip-norm")),
        ("seed", 2**63 - 1, 2**63, {}),
        ("cohort", 10, 11, {}),
        ("min-cohort", 10, 11, {}),
        ("min-cohort", 4, 5, {"cohort": 4}),
        ("grid", 1.0, ABOVE_ONE, CLIENT),
        ("weighting", "uniform", "size", CLIENT),
        ("name", "x" * 200, "x" * 201, {}),
        ("name", "...", "..", {}),
        ("name", "x", "", {"restart": True}),
    ],
)
def test_the_last_value_that_is_allowed_and_the_first_that_is_not(
    key: str, inside: Any, outside: Any, others: dict[str, Any]
) -> None:
    assert config_with({**others, key: inside}).to_mapping()[key] == inside
    with pytest.raises(ConfigError, match=rf", got {key}="):
        config_with({**others, key: outside})


@pytest.mark.parametrize("field", _PLANNED)
def test_what_goes_into_a_plan_has_the_ranges_of_plans(field: str) -> None:
    allowed, key = RANGES[_PLANNED[field]], key_of(field)
    kind = type(defaults()[key])
    for value in (allowed.least, allowed.most):
        assert config_with({key: kind(value)}).to_mapping()[key] == value
    outside = [math.nextafter(allowed.least, -1), math.nextafter(allowed.most, math.inf), math.nan]
    for value in [-1, allowed.most + 1] if kind is int else outside:
        with pytest.raises(ConfigError, match=rf"expected a (finite )?number .*, got {key}="):
            config_with({key: kind(value)})


def test_a_missing_key_is_named() -> None:
    mapping = defaults()
    del mapping["epsilon"]
    with pytest.raises(ConfigError, match="lacks epsilon"):
        RunConfig.parse(mapping)


def test_whole_numbers_may_stand_for_floats() -> None:
    assert config_with({"epsilon": 3}).epsilon == 3.0


def test_derived_values() -> None:
    config = config_with({"cohort": 4, "rounds": 7, "rounds-per-epoch": 2})
    assert config.cohort_size == 4
    assert config.schedule.cooling_epochs == 4
    assert config_with({}).cohort_size == 10
    assert config_with({"cooling-epochs": 3}).schedule.cooling_epochs == 3
    assert config_with({"name": "mine"}).run_name == "mine"
    assert "not-private" in config_with({"private": False}).run_name
    assert "/" not in config_with({"dataset": "/some/where/data.npz"}).run_name


def test_assignments_take_the_type_of_their_default() -> None:
    known = defaults()
    assert parse_assignment("rounds=3", known) == ("rounds", 3)
    assert parse_assignment("epsilon=3", known) == ("epsilon", 3.0)
    assert parse_assignment("private=False", known) == ("private", False)
    assert parse_assignment("name=a=b", known) == ("name", "a=b")
    for text, message in [
        ("rounds", "expected key=value"),
        ("rond=3", "did you mean 'rounds'"),
        ("rounds=3.5", "type int for rounds, got '3.5'"),
        ("private=maybe", "true or false for private"),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse_assignment(text, known)


def test_every_key_is_described() -> None:
    assert all(len(text) > 10 for text in describe_keys().values())


@pytest.mark.parametrize(
    ("changes", "used", "noise_is_coded"),
    [
        ({}, ("calibrated", "calibrated", "seed"), True),
        ({"value-coding": "int8", "downlink-coding": "f32"}, ("int8", "f32", "seed"), False),
        ({"private": False}, ("f16", "f16", "seed"), False),
        ({"private": False, "value-coding": "f32", "downlink-coding": "f32"}, ("f32", "f32", "seed"), False),
        ({"method": "noisy-only"}, ("f16", "f16", "seed"), False),
        ({"privacy-unit": "client", "client-momentum": 0.0}, ("calibrated", "calibrated", "seed"), False),
        ({"method": "select-random"}, ("calibrated", "calibrated", "compact"), True),
        ({"method": "select-random", "index-coding": "raw"}, ("calibrated", "calibrated", "raw"), True),
    ],
)
def test_codings_that_cannot_be_used_are_stood_in_for(
    changes: dict[str, Any], used: tuple[str, ...], noise_is_coded: bool
) -> None:
    config = config_with(changes)
    assert (config.value_coding_used, config.downlink_coding_used, config.index_coding_used) == used
    assert config.released_noise_is_coded is noise_is_coded


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "fashion-mnist-12k-dp-cnn-s-eps8-density0.3-seed1"),
        ({"private": False}, "fashion-mnist-12k-dp-cnn-s-not-private-density0.3-seed1"),
        ({"method": "ranked", "epsilon": 2.5}, "fashion-mnist-12k-dp-cnn-s-ranked-eps2.5-density0.3-seed1"),
        ({"dataset": "a/b/", "model": "mlp:3-2"}, "b-mlp_3-2-eps8-density0.3-seed1"),
        ({"name": "mine"}, "mine"),
    ],
)
def test_a_run_is_named_by_what_it_is(changes: dict[str, Any], name: str) -> None:
    assert config_with(changes).run_name == name
