"""The audit finds a broken mechanism, and does not accuse a sound one."""

import hashlib
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom, norm

from client.randomness import OsRandomness
from common.charges import Charge, PrivacyUnit
from common.errors import ConfigError
from common.mask import MaskSpec
from common.methods import METHODS
from common.randomness import KeyStream, SecureRandomness
from server.methods import open_policy
from simulations.audit import audit, claims_of, curve_through, factor_ruled_out, is_ruled_out
from simulations.audit_plan import AuditPlan, plan_for, plan_of_run
from simulations.canaries import scores_of
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


def _chance(curve: Callable[[float], float], canaries: int, guesses: int, right: int) -> float:
    """Return the largest probability of ``right`` right guesses that is not ruled out."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if is_ruled_out(curve, canaries, guesses, right, middle) else (middle, high)
    return high


def test_the_bound_of_a_pure_claim_is_hardly_more_than_that_of_a_binomial() -> None:
    epsilon = curve_through([(1.0, 0.0)])
    for right in (80, 86, 90):
        binomial = binom.sf(right - 1, 100, math.e / (1 + math.e))
        assert binomial * (1 - 1e-9) <= _chance(epsilon, 1000, 100, right) < 1.2 * binomial
    assert _chance(curve_through([(1.0, 1e-3)]), 1000, 100, 80) > _chance(epsilon, 1000, 100, 80)
    assert _chance(epsilon, 1000, 100, 0) == 1.0 and not is_ruled_out(epsilon, 1000, 100, 0, 0.05)


@pytest.mark.parametrize("claims", [[(1.0, 0.01)], [(0.0, 0.1), (0.4, 0.02), (1.0, 1e-3), (2.0, 1e-5)]])
@pytest.mark.parametrize(("canaries", "guesses", "right"), [(40, 40, 30), (100, 30, 24), (500, 20, 20)])
def test_the_bound_is_the_best_that_any_distribution_of_right_guesses_can_do(
    claims: list[tuple[float, float]], canaries: int, guesses: int, right: int
) -> None:
    """The same by linear programming: the largest P[k >= right] among all p_k that keep every claim."""
    k = np.arange(guesses + 1)
    rows, limits = [], []
    for i in range(guesses):
        r, h = np.where(k > i, k, 0) / canaries, np.where(k >= i, guesses - k, 0) / canaries
        for epsilon, delta in claims:
            rows += [r - math.exp(epsilon) * h, math.exp(epsilon) * r - h]
            limits += [delta, math.exp(epsilon) - 1 + delta]
    best = linprog(-(k >= right).astype(float), rows, limits, np.ones((1, k.size)), [1.0])
    assert best.success
    assert _chance(curve_through(claims), canaries, guesses, right) == pytest.approx(-best.fun, rel=1e-6)


def test_a_gaussian_claim_is_its_curve_and_at_least_what_its_renyi_bounds_say() -> None:
    exact, sampled = (curve_through(claims_of((Charge(2.0, rate, 3),))) for rate in (1.0, 1 - 1e-9))
    mu = math.sqrt(3) / 2
    for x in (1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9):
        assert exact(x) == pytest.approx(norm.cdf(norm.ppf(x) - mu), rel=0.01)
        assert 0.2 * exact(x) < sampled(x) <= exact(x) <= x
    assert exact(0.0) == 0.0 and exact(1.0) == pytest.approx(1.0, abs=1e-6)


def test_the_factor_is_where_the_claims_are_no_longer_ruled_out() -> None:
    claims = [(0.0, 0.1), (0.4, 0.02), (1.0, 1e-3)]
    factor = factor_ruled_out(claims, 1000, 200, 150, 0.05)
    for tried, expected in ((factor - 1e-3, True), (factor + 1e-3, False)):
        scaled = curve_through([(tried * epsilon, delta) for epsilon, delta in claims])
        assert is_ruled_out(scaled, 1000, 200, 150, 0.05) is expected
    assert factor_ruled_out(claims, 1000, 200, 105, 0.05) == 0.0, "luck"


@pytest.mark.parametrize("mechanism", ["randomised response", "gaussian"])
def test_the_tightest_mechanisms_are_hardly_ever_accused(mechanism: str) -> None:
    """Each meets its claim with equality: it is accused in at most 5 % of the games, and of twice the noise in most."""
    rng, games, canaries, guesses = np.random.default_rng(1), 300, 1000, 200
    claim, bolder = (
        (curve_through(claims_of((Charge(2.0, 1.0, 1),))), curve_through(claims_of((Charge(4.0, 1.0, 1),))))
        if mechanism == "gaussian"
        else (curve_through([(1.0, 0.0)]), curve_through([(0.5, 0.0)]))
    )
    accused, caught = 0, 0
    for _ in range(games):
        included = rng.random(canaries) < 0.5
        if mechanism == "gaussian":
            order = np.argsort(included + 2.0 * rng.standard_normal(canaries))
        else:
            order = np.argsort(np.where(rng.random(canaries) < math.e / (1 + math.e), included, ~included))
        right = int((~included[order[: guesses // 2]]).sum() + included[order[-guesses // 2 :]].sum())
        accused += is_ruled_out(claim, canaries, guesses, right, 0.05)
        caught += is_ruled_out(bolder, canaries, guesses, right, 0.05)
    assert accused <= 0.05 * games + 3 * math.sqrt(0.05 * 0.95 * games)
    assert caught > 0.5 * games


@pytest.mark.parametrize("seed", range(5))
def test_a_sound_mechanism_passes_and_a_third_of_its_noise_does_not(seed: int) -> None:
    plan = plan_for("record", 1.0, 1e-5, "random", 5000)
    sound = audit(plan, 5000, seed, OsRandomness)
    assert sound.passed and 0 < sound.lower_bound <= sound.claimed_epsilon <= 1
    broken = audit(plan, 5000, seed, WeakSource)
    assert not broken.passed and broken.lower_bound > 1


CANARIES = {"compressive": 1000}  # each is a site of its own


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


def _little_noise(method: str, *, unit: PrivacyUnit = "record", **changes: Any) -> AuditPlan:
    plan = plan_for(unit, 1.0, 1e-5, method, 40)
    return replace(plan, **{"noise_multiplier": 0.001, "value_coding": "f32", "rounds": 3, **changes})


def _scores(plan: AuditPlan, included: np.ndarray) -> np.ndarray:
    return scores_of(plan, included, SeededSites(weak=False), lambda: SeededSites(weak=False).for_round("", 1))


_INCLUDED = np.random.default_rng(1).random(40) < 0.5


@pytest.mark.parametrize("unit", ["record", "client"])
def test_where_there_is_hardly_any_noise_a_score_is_how_far_its_canary_moved_a_coordinate(unit: PrivacyUnit) -> None:
    plan = _little_noise("random", unit=unit, density=0.5)
    masks = (
        [MaskSpec(1, number, 40, 20) for number in (1, 2, 3)]
        if unit == "client"
        else [open_policy(plan.config(40), 40).mask(number) for number in (1, 2, 3)]
    )
    times = np.bincount(np.concatenate([mask.indices() for mask in masks]), minlength=40)
    assert _scores(plan, _INCLUDED) * 40 == pytest.approx(_INCLUDED * times, abs=0.03)
    if unit == "record":  # a client's movement is clipped as a whole, however many steps it took
        assert _scores(replace(plan, steps=2), _INCLUDED) * 40 == pytest.approx(2 * _INCLUDED * times, abs=0.03)
    sampled = _scores(replace(plan, sampling_rate=0.5, density=1.0), _INCLUDED) * 20
    assert sampled == pytest.approx(np.rint(sampled), abs=0.03) and not np.rint(sampled)[~_INCLUDED].any()
    assert 0 < np.rint(sampled)[_INCLUDED].mean() < 3 == round(_scores(plan, _INCLUDED).max() * 40)


def test_where_there_is_hardly_any_noise_a_measured_score_is_the_whole_likelihood_ratio() -> None:
    # What is measured goes from one end of its range to the other, which noise of multiplier 1 makes a ratio of e.
    plan = _little_noise("compressive", rounds=1)
    assert _scores(plan, _INCLUDED) / 1000 == pytest.approx(np.where(_INCLUDED, 1, -1), abs=0.05)
    two = _scores(replace(plan, density=0.04), _INCLUDED) / 1000  # of two columns, which do not point quite alike
    assert np.abs(two) == pytest.approx(np.abs(two).mean(), abs=0.05) and 0.7 < np.abs(two).mean() < 1
    assert ((two > 0) == _INCLUDED).all()
    sampled = _scores(replace(plan, sampling_rate=0.9, rounds=2), _INCLUDED)
    assert sampled[~_INCLUDED] == pytest.approx(2 * math.log(0.1))
    assert np.median(sampled[_INCLUDED]) > 1500


def test_picks_of_a_run_are_audited_with_the_runs_own_charge(tmp_path: Path) -> None:
    """What picks cost depends on their number, whatever the number of canaries."""
    settings = {"method": "select-exponential", "final_density": 0.3, "pick_epsilon": 0.1, "steps_per_round": 1}
    run = simulate(small_config(tmp_path, epsilon=30.0, **settings), Engine(in_process=True))
    plan = plan_of_run(run.folder)
    assert plan.claimed_epsilon(300) == plan.claimed_epsilon(2000) == run.epsilon
    assert plan.density_of(39) == 1.0
    with pytest.raises(ConfigError, match="sites pick 39 coordinates in this run: expected as many canaries, got 38"):
        plan.claimed_epsilon(38)


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


def test_one_round_with_everything_is_attacked_but_where_other_settings_show_more() -> None:
    for method, unit, expected, size, share in (
        ("random", "record", (1, 1.0, "calibrated", "prv", {}), 700, 0.15),
        ("random", "client", (1, 1.0, "calibrated", "prv", {}), 700, 0.15),
        ("importance", "record", (2, 1.0, "calibrated", "prv", {"warmup-epochs": 1, "first-density": 1.0}), 700, 0.15),
        ("select-exponential", "record", (1, 1.0, "calibrated", "rdp", {"pick-epsilon": 1e-3}), 700, 0.15),
        (
            "select-sparse-vector",
            "record",
            (1, 1.0, "calibrated", "rdp", {"pick-epsilon": 1e-5, "pick-threshold": 0.0}),
            700,
            0.07,
        ),
        ("select-random", "record", (1, 1.0, "calibrated", "prv", {"second-clip-norm": 0.0}), 700, 0.15),
        ("compressive", "record", (1, 1 / 50, "f32", "rdp", {"measurements": 8}), 50, 0.15),
    ):
        plan = plan_for(unit, 2.0, 1e-6, method, 700)  # type: ignore[arg-type]
        assert (plan.rounds, plan.density, plan.value_coding, plan.accountant, plan.settings) == expected
        assert (plan.sampling_rate, plan.steps, plan.grid, plan.delta, plan.parameters) == (1.0, 1, 0.05, 1e-6, 0)
        assert (plan.size(700), plan.guess_share) == (size, share)
        assert 1.99 < plan.claimed_epsilon(700) <= 2.0


def test_the_attacked_config_is_that_of_the_plan_with_one_site_and_bare_steps() -> None:
    plan = AuditPlan(
        privacy_unit="client",
        noise_multiplier=1.2,
        sampling_rate=0.25,
        steps=4,
        rounds=3,
        density=0.5,
        value_coding="int8",
        grid=1.5,
        delta=1e-6,
        accountant="prv",
    )
    config = plan.config(40)
    assert (config.sites, config.cohort, config.min_cohort, config.privacy_unit) == (1, 0, 1, "record")
    assert (config.rounds, config.steps_per_round, config.sampling_rate, config.final_density) == (3, 4, 0.25, 0.5)
    assert (config.value_coding, config.grid, config.delta, config.accountant) == ("int8", 1.5, 1e-6, "prv")
    assert (config.clip_norm, config.learning_rate, config.client_momentum) == (1.0, 1.0, 0.0)
    assert plan.history(40) == (Charge(1.2, 0.25, 3),)


def test_the_plan_of_a_client_level_run_has_its_cohort_rate(tmp_path: Path) -> None:
    settings = {"privacy_unit": "client", "sites": 4, "cohort": 2, "rounds": 2, "steps_per_round": 2}
    run = simulate(small_config(tmp_path, epsilon=50.0, **settings), Engine(in_process=True))
    plan = plan_of_run(run.folder)
    assert (plan.privacy_unit, plan.sampling_rate, plan.rounds, plan.steps) == ("client", 0.5, 2, 2)
    assert plan.claimed_epsilon(100) == pytest.approx(run.epsilon)
    assert not plan.settings.keys() & {"name", "out", "resume", "dataset", "partition", "server-key", "weighting"}


def test_the_most_and_the_least_conspicuous_are_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []

    def scores(plan: AuditPlan, included: np.ndarray, *_: object) -> np.ndarray:
        seen.append(included)
        return included + np.linspace(0, 0.5, included.size)

    monkeypatch.setattr("simulations.audit.scores_of", scores)
    plan = plan_for("record", 1.0, 1e-5, "random", 1000)
    found = audit(plan, 1000, 3)
    assert (found.canaries, found.guesses, found.right, found.delta) == (1000, 150, 150, 1e-5)
    assert 400 < seen[0].sum() < 600 and not audit(plan, 1000, 4).passed and (seen[0] != seen[1]).any()
    monkeypatch.setattr("simulations.audit.scores_of", lambda plan, included, *_: -scores(plan, included))
    lost = audit(plan, 1000, 3)
    assert lost.right == 0 and lost.passed and lost.lower_bound == 0
    assert replace(found, lower_bound=found.claimed_epsilon).passed
    assert audit(plan_for("record", 1.0, 1e-5, "select-sparse-vector", 1000), 1000, 3).guesses == 70


def test_a_claim_that_is_far_too_small_is_ruled_out_by_a_factor_of_16_at_most() -> None:
    assert factor_ruled_out([(0.01, 0.0)], 1000, 200, 200, 0.05) == pytest.approx(16, abs=1e-4)


def test_claims_are_what_the_accountant_says_at_many_deltas() -> None:
    sampled = claims_of((Charge(2.0, 0.5, 3),))
    assert [delta for _, delta in sampled] == pytest.approx(np.geomspace(1e-7, 0.5, 60))
    exact = claims_of((Charge(2.0, 1.0, 3),))
    assert len(exact) == 200 and exact[0][0] == 0 and exact[-1][1] < 1e-9
    assert curve_through([(800.0, 0.0)])(1.0) == 0.0


def test_too_few_canaries_prove_nothing() -> None:
    plan = plan_for("record", 1.0, 1e-5, "random", 100)
    assert audit(plan, 100, 1).canaries == 100
    with pytest.raises(ConfigError, match="at least 100 canaries, got 99"):
        audit(plan, 99, 1)


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
