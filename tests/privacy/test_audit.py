"""The audit finds a broken mechanism, and does not accuse a sound one."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from client.randomness import OsRandomness
from common.errors import ConfigError
from common.randomness import SecureRandomness
from simulations.audit import AuditPlan, audit, epsilon_lower_bound, p_value, plan_for, plan_of_run
from simulations.cli import main
from simulations.run import Engine, simulate
from tests.support import small_config


class Weakened(SecureRandomness):
    """Noise divided by three."""

    def standard_normal(self, count: int) -> np.ndarray:
        return super().standard_normal(count) / 3


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
    plan = plan_for("record", 1.0, 1e-5)
    sound = audit(plan, 5000, seed, OsRandomness)
    assert sound.passed and 0 < sound.lower_bound <= sound.claimed_epsilon <= 1
    broken = audit(plan, 5000, seed, WeakSource)
    assert not broken.passed and broken.lower_bound > 1


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
    result = audit(plan_for("client", 1.0, 1e-5), 3000, 1, server_randomness=randomness)
    assert result.passed == passes


def test_too_few_canaries_prove_nothing() -> None:
    with pytest.raises(ConfigError, match="at least 100 canaries, got 10"):
        audit(plan_for("record", 1.0, 1e-5), 10, 1)


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


def test_a_run_without_privacy_claims_nothing(tmp_path: Path) -> None:
    run = simulate(small_config(tmp_path, private=False), Engine(in_process=True))
    with pytest.raises(ConfigError, match="not private"):
        plan_of_run(run.folder)
