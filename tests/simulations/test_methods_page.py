"""``fedsieve methods`` and ``fedsieve simulate --suggest``."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.datasets import Dataset
from common.errors import ConfigError
from common.methods import METHODS
from common.models import initial_vector
from server.aggregate import ServerOptimizer
from simulations.cli import main
from simulations.suggest import Probe, bound_terms, optimal_density, probe, scaling_partners, suggest, synthetic_like
from tests.support import small_config, small_dataset


def test_the_table_names_every_method_with_its_upload_unit_and_paper(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    entries = {entry.split()[0]: entry for entry in re.split(r"\n(?=\S)", out)}
    names = max(map(len, METHODS)) + 2
    first, method = out.splitlines()[:4], next(iter(METHODS.values()))
    assert first[0].rstrip() == method.name.ljust(names) + method.title
    assert [line[:names].strip() for line in first[1:]] == [""] * 3 and first[3].strip() == ""
    assert first[2].strip() == method.paper
    for name, method in METHODS.items():
        assert f"uploads {method.uploads};" in entries[name] and method.paper in entries[name]
        assert ("accounting: NOT PRIVATE" in entries[name]) == (not method.private)


def test_a_narrow_screen_cuts_no_word_of_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out and max(map(len, out.splitlines())) <= 80
    words = set(out.split())
    assert all(set(method.title.split()) <= words for method in METHODS.values())


@pytest.mark.parametrize("name", METHODS)
def test_show_explains_one(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    assert main(["methods", "show", name]) == 0
    out = capsys.readouterr().out
    assert METHODS[name].about in out and ("nobody: NOT PRIVATE" in out) == (not METHODS[name].private)
    assert f"\naccounting  {METHODS[name].accounting if METHODS[name].private else 'NOT PRIVATE'}\n" in out
    code = next(line for line in out.splitlines() if line.startswith("code"))
    for path in code.removeprefix("code").split(","):
        assert Path(path.strip()).exists()


def test_facts_are_not_broken_where_the_screen_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["methods", "show", "dense"]) == 0
    assert f"\npaper       {METHODS['dense'].paper}\n" in capsys.readouterr().out


def test_an_unknown_method_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["methods", "show", "rnadom"], ["simulate", "--method", "rnadom"]):
        assert main(arguments) == 2
        assert "unknown method 'rnadom': expected one of dense, random" in capsys.readouterr().err


def test_the_density_is_where_the_bound_is_least() -> None:
    for clip_term, noise_term in ((1.0, 4.0), (0.3, 0.4), (2.0, 1.0), (1.0, 0.0)):
        densities = np.linspace(1e-3, 1, 100_000)
        bound = clip_term / np.sqrt(densities) + np.sqrt(densities) * noise_term
        assert optimal_density(clip_term, noise_term) == pytest.approx(densities[bound.argmin()], abs=1e-4)


def test_the_terms_are_those_of_appendix_g() -> None:
    terms = {"parameters": 1000, "noise_multiplier": 2.0, "clip_norm": 0.5, "learning_rate": 4.0, "steps": 100}
    clip_term, noise_term = bound_terms(Probe(1.5, 3.0), batch=50.0, **terms)  # type: ignore[arg-type]
    assert clip_term == pytest.approx(1.5 / (4 * 100) + 4 * 3 * 0.25 / 2)
    assert noise_term == pytest.approx(4 * 0.25 * 4 * 1000 * 3 / (2 * 2500))


def test_partners_have_the_same_noise() -> None:
    assert (0.1, 0.9) in [(pytest.approx(c), mu) for c, mu in scaling_partners(1.0, 0.0)]
    assert {round(c / (1 - mu), 9) for c, mu in scaling_partners(0.2, 0.5)} == {0.4}
    # In the end the server's velocity moves a coordinate by as much for all partners, also where masks come and go.
    rng, ends = np.random.default_rng(4), []
    for clip_norm, momentum in scaling_partners(1.0, 0.0):
        optimizer = ServerOptimizer("momentum", 1.0, momentum, 8)
        model = optimizer.step(np.zeros(8, np.float32), np.arange(8), np.full(8, clip_norm, np.float32))
        for _ in range(3000):
            kept = np.flatnonzero(rng.random(8) < 0.5)
            model = optimizer.step(model, kept, np.zeros(kept.size, np.float32))
        ends.append(model)
    assert np.allclose(ends, 1.0, rtol=1e-4)


def test_the_probing_run_sees_synthetic_data_alone(tmp_path: Path) -> None:
    dataset = small_dataset()
    made_up = synthetic_like(dataset, 1)
    changed = small_dataset()
    changed.train_inputs[:] = 7.0
    again = synthetic_like(changed, 1)
    assert np.array_equal(made_up.train_inputs, again.train_inputs)  # the records change nothing
    assert made_up.train_inputs.shape[1:] == dataset.train_inputs.shape[1:]
    seen = probe(small_config(tmp_path), made_up)
    assert seen.smoothness > 0 and seen.loss_drop > 0


def test_the_probing_run_measures_a_loss_that_is_known(tmp_path: Path) -> None:
    """Mean squared error on records that are spread evenly: the gradient turns by twice the way, in every direction."""
    corners = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]], np.float32)
    targets = corners @ np.array([1.5, -0.5], np.float32) + 2
    data = Dataset(corners, targets, corners, targets)
    settings = {"model": "tests.support:squared_error_model", "clip_norm": 1e6, "learning_rate": 0.02}
    config = small_config(tmp_path, **settings)
    weights = initial_vector(config.model, config.seed) - [1.5, -0.5, 2]
    seen = probe(config, data)
    assert seen.smoothness == pytest.approx(2, rel=1e-3)
    # Each of the 30 steps leaves 1 - 2 * 0.02 of the way.
    assert seen.loss_drop == pytest.approx((weights**2).sum() * (1 - 0.96**60), rel=1e-3)
    assert probe(small_config(tmp_path, **{**settings, "clip_norm": 1e-3}), data).loss_drop < 0.1 * seen.loss_drop
    far, settings = Dataset(1e3 * corners, targets, corners, targets), {**settings, "clip_norm": 1e9}
    with pytest.raises(ConfigError, match="did not stay finite: lower 'learning-rate'"):
        probe(small_config(tmp_path, **{**settings, "learning_rate": 1e9}), far)


def test_nothing_synthetic_for_targets_that_are_no_classes() -> None:
    made_up = synthetic_like(small_dataset(), 1)
    assert made_up.train_inputs.min() >= 0 and 0.9 < made_up.train_inputs.max() <= 1
    assert np.bincount(made_up.train_targets).tolist() == [171, 171, 170]
    whole = small_dataset()
    for targets in (whole.train_targets.astype(np.float32), whole.train_targets[:, None]):
        with pytest.raises(ConfigError, match="no synthetic data for targets that are not classes"):
            synthetic_like(replace(whole, train_targets=targets), 1)


@pytest.mark.parametrize("changes", [{"private": False}, {"privacy_unit": "client"}])
def test_suggest_weighs_the_noise_of_records_alone(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="weighs the noise of a private run per record"):
        suggest(small_config(tmp_path, **changes), None)


def test_a_suggestion_is_the_least_of_the_bound_with_these_settings(tmp_path: Path) -> None:
    config = small_config(tmp_path, noise_multiplier=30.0, epsilon=1e4, clip_norm=0.8, sites=4, cohort=2, rounds=3)
    seen = probe(config, synthetic_like(small_dataset(), config.seed))
    batch, steps = config.sampling_rate * 240 / 4 * 2**0.5, 3 * config.steps_per_round
    # Of a cohort drawn at random a site may be in every round: so many steps are planned for it.
    settings = {"clip_norm": 0.8, "noise_multiplier": 30.0, "learning_rate": config.learning_rate}
    clip_term, noise_term = bound_terms(seen, parameters=131, batch=batch, steps=steps, **settings)
    text = suggest(config, None)
    assert text.startswith(f"final-density {optimal_density(clip_term, noise_term):.3g}   minimises")
    assert f"  loss and clipping   {clip_term:.4g}\n" in text
    assert f"  noise               {noise_term:.4g}   z 30, 131 parameters, batch {batch:.4g}\n" in text
    assert f"G = {seen.smoothness:.4g}, how" in text and f"fall of the loss by {seen.loss_drop:.4g} (here" in text
    assert f"  {steps} steps) are those of a probing run of 30 clipped steps" in text
    assert "All sites have 60 records; the mean over a cohort of 2 is" in text
    assert "(clip-norm, server-momentum) (0.8, 0), (0.4, 0.5), (0.08, 0.9), (0.008, 0.99)\n" in text


def test_suggest_says_what_it_assumes_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = [
        "--dataset",
        "tests.support:small_dataset",
        "--model",
        "mlp:12-8-3",
        "--sites",
        "4",
        "--out",
        str(tmp_path),
    ]
    assert main(["simulate", *quick, "--suggest", "--set", "noise-multiplier=30"]) == 0
    out = capsys.readouterr().out
    density = float(out.split()[1])
    assert out.startswith("final-density ") and 0 < density < 1 and "Assumed:" in out
    assert "\n(clip-norm, server-momentum) (1, 0), (0.5, 0.5)" in out
    assert not list(tmp_path.iterdir())
    assert main(["simulate", *quick, "--probe", "x"]) == 2
    assert "goes with --suggest" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="private run per record"):
        suggest(small_config(tmp_path, private=False), None)
    # A site's velocity ends with the round, so that the rule is not for it: with clip norm 1 it would begin at (10, 0).
    mine = {"noise_multiplier": 30.0, "epsilon": 1e4, "clip_norm": 1.0, "client_momentum": 0.9}
    public = suggest(small_config(tmp_path, **mine), "tests.support:small_dataset")
    assert "on the data set tests.support:small_dataset" in public and "server-momentum) (1, 0)" in public
    mine |= {"server_optimizer": "momentum", "server_momentum": 0.5}
    assert "server-momentum) (2, 0)" in suggest(small_config(tmp_path, **mine), "tests.support:small_dataset")
