import dataclasses
from typing import Any

import pytest

from common.config import RunConfig, describe_keys, key_of, parse_assignment
from common.errors import ConfigError
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
