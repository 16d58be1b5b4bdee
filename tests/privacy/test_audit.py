"""The audit finds a broken mechanism, and does not accuse a sound one."""

import hashlib
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from client.randomness import OsRandomness
from common.errors import ConfigError
from common.methods import METHODS
from common.randomness import KeyStream, SecureRandomness
from simulations.audit import audit, epsilon_lower_bound, p_value
from simulations.audit_plan import AuditPlan, plan_for, plan_of_run
from simulations.cli import main
from simulations.run import Engine, simulate
from tests.support import small_config


class Weakened(SecureRandomness):
    """Noise divided by three, Gaussian and Laplace: the logarithm of a cube root is a third."""

    def standard_normal(self, count: int) -> np.ndarray:
        return super().standard_normal(count) / 3

    def open_uniforms(self, count: int) -> np.ndarray:
        return np.cbrt(super().open_uniforms(count))


class WeakSource:
    def for_round(self, run: str, round_number: int) -> SecureRandomness:
        return Weakened.fresh()


def test_the_bound_without_delta_is_that_of_a_binomial() -> None:
    assert p_value(1000, 100, 80, 1.0, 0.0) == pytest.approx(binom.sf(79, 100, math.e / (1 + math.e)))
    assert p_value(1000, 100, 80, 1.0, 1e-3) > p_value(1000, 100, 80, 1.0, 0.0)
    assert p_value(1000, 100, 0, 1.0, 0.0) == 1.0
    assert epsilon_lower_bound(1000, 100, 50, 0.0, 0.05) == 0.0
    all_right = epsilon_lower_bound(1000, 100, 100, 0.0, 0.05)
    assert (1 / (1 + math.exp(-all_right))) ** 100 == pytest.approx(0.05, rel=1e-3)


def test_randomised_response_is_bounded_by_its_epsilon() -> None:
    """The tightest mechanism there is: the bound comes close to its epsilon and passes it in 5 % of the trials."""
    rng, epsilon, trials = np.random.default_rng(1), 1.0, 200
    right = rng.binomial(400, math.exp(epsilon) / (1 + math.exp(epsilon)), trials)
    bounds = [epsilon_lower_bound(400, 400, int(count), 0.0, 0.05) for count in right]
    assert np.mean(np.array(bounds) > epsilon) < 0.1
    assert np.median(bounds) > 0.75


@pytest.mark.parametrize("seed", range(5))
def test_a_sound_mechanism_passes_and_a_third_of_its_noise_does_not(seed: int) -> None:
    plan = plan_for("record", 1.0, 1e-5, "random", 5000)
    sound = audit(plan, 5000, seed, OsRandomness)
    assert sound.passed and 0 < sound.lower_bound <= sound.claimed_epsilon <= 1
    broken = audit(plan, 5000, seed, WeakSource)
    assert not broken.passed and broken.lower_bound > 1


# Picks are accounted less tightly than Gaussian noise alone, and the sparse vector technique shows a third of the
# coordinates: there it takes more canaries. A measured canary is a site of its own.
CANARIES = {"select-exponential": 20_000, "select-sparse-vector": 20_000, "compressive": 1000}


class SeededSites:
    """Seeded noise, of its own for every site, so that the outcome below is the same every time."""

    def __init__(self, weak: bool) -> None:
        self._sites, self._weak = itertools.count(), weak

    def __call__(self) -> "SeededSites":
        return self

    def for_round(self, run: str, round_number: int) -> SecureRandomness:
        keys = [hashlib.sha256(f"{next(self._sites)} {use}".encode()).digest() for use in ("sampling", "noise")]
        return (Weakened if self._weak else SecureRandomness)(KeyStream(keys[0]), KeyStream(keys[1]))


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.private])
def test_a_third_of_the_noise_of_any_method_is_noticed(name: str) -> None:
    canaries = CANARIES.get(name, 5000)
    plan = plan_for("record", 1.0, 1e-5, name, canaries)
    sound, broken = (audit(plan, canaries, 1, SeededSites(weak)) for weak in (False, True))
    assert 0.05 < sound.lower_bound <= sound.claimed_epsilon <= 1
    assert 0.99 < sound.claimed_epsilon < broken.lower_bound


def test_picks_of_a_run_are_audited_with_the_runs_own_charge(tmp_path: Path) -> None:
    """What picks cost depends on their number, whatever the number of canaries."""
    settings = {"method": "select-exponential", "final_density": 0.3, "pick_epsilon": 0.1, "steps_per_round": 1}
    run = simulate(small_config(tmp_path, epsilon=30.0, **settings), Engine(in_process=True))
    plan = plan_of_run(run.folder)
    assert plan.claimed_epsilon(300) == plan.claimed_epsilon(2000) == run.epsilon
    with pytest.raises(ConfigError, match="sites pick 39 coordinates"):
        plan.claimed_epsilon(30)


def test_measurements_of_a_run_are_audited_on_a_model_of_its_size(tmp_path: Path) -> None:
    settings = {"method": "compressive", "final_density": 0.02, "steps_per_round": 1, "sampling_rate": 0.7}
    run = simulate(small_config(tmp_path, model="linear:12-3", epsilon=5.0, **settings), Engine(in_process=True))
    plan = plan_of_run(run.folder)
    result = audit(plan, 1000, 1, SeededSites(weak=False))
    assert plan.size(1000) == 39 and 0 < result.lower_bound <= result.claimed_epsilon == run.epsilon


def test_what_claims_nothing_cannot_be_audited() -> None:
    for method, unit in (("clip-only", "record"), ("compressive", "client")):
        with pytest.raises(ConfigError, match="claims nothing"):
            plan_for(unit, 1.0, 1e-5, method, 100)  # type: ignore[arg-type]


def test_the_audit_reaches_whole_runs_under_a_mask() -> None:
    plan = AuditPlan(
        privacy_unit="record",
        noise_multiplier=1.2,
        sampling_rate=0.5,
        steps=4,
        rounds=3,
        density=0.5,
        value_coding="calibrated",
        grid=1.0,
        delta=1e-5,
    )
    assert audit(plan, 3000, 1).passed


@pytest.mark.parametrize(
    ("randomness", "passes"), [(SecureRandomness.fresh, True), (Weakened.fresh, False)], ids=["sound", "broken"]
)
def test_client_level_noise_is_audited_too(randomness: Callable[[], SecureRandomness], passes: bool) -> None:
    result = audit(plan_for("client", 1.0, 1e-5, "random", 3000), 3000, 1, server_randomness=randomness)
    assert result.passed == passes


def test_too_few_canaries_prove_nothing() -> None:
    with pytest.raises(ConfigError, match="at least 100 canaries, got 10"):
        audit(plan_for("record", 1.0, 1e-5, "random", 100), 10, 1)


def test_the_command_ends_with_its_line_and_the_report_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = simulate(small_config(tmp_path), Engine(in_process=True))
    assert main(["audit", "--run-folder", str(run.folder), "--canaries", "1000"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("BAR claimed_epsilon=7.99") and last.endswith("canaries=1000")
    found = json.loads((run.folder / "audit.json").read_text())
    assert found["claimed_epsilon"] == run.epsilon and found["plan"]["steps"] == 3
    assert main(["report", str(run.folder)]) == 0
    assert "an attack with 1,000 canaries" in (run.folder / "report.html").read_text()
    to = tmp_path / "posterior.json"
    assert main(["audit", "--method", "posterior", "--canaries", "500", "--to", str(to)]) == 0
    assert json.loads(to.read_text())["plan"]["method"] == "posterior"


def test_a_run_without_privacy_claims_nothing(tmp_path: Path) -> None:
    run = simulate(small_config(tmp_path, private=False), Engine(in_process=True))
    with pytest.raises(ConfigError, match="not private"):
        plan_of_run(run.folder)
