"""Attacks on real releases: they succeed where nothing protects, and less where more does."""

import base64
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from client.site import Workbench
from common.config import ConfigValue
from common.datasets import Dataset
from common.errors import ConfigError
from simulations import cli
from simulations.attacks import canaries, pictures
from simulations.attacks.inversion import Inversion, InversionSettings, _total_variation, invert_releases
from simulations.attacks.linear import LinearSettings, attack_releases, bound, solve
from simulations.attacks.page import data_uri, write_page
from simulations.attacks.settings import as_mapping, defaults_of, parse_settings
from simulations.attacks.victim import Question, Release, Victim
from simulations.experiments.definition import find, load
from simulations.experiments.measures import MEASURES
from simulations.experiments.results import Results
from simulations.experiments.runner import RESULTS, Task


def _mse(density: float, noise: float, smoothness: float, clip_norm: float = 10.0) -> float:
    """Return the error of the attack; at the default clip norm nothing is clipped, ``noise`` is its std."""
    settings = InversionSettings(
        density=density,
        noise_multiplier=noise / clip_norm,
        clip_norm=clip_norm,
        smoothness=smoothness,
        pictures=2,
        iterations=100,
        step=0.1,
    )
    return invert_releases(settings, seed=1).figures["mse"]


def test_inversion_succeeds_without_protection_and_fails_more_as_the_rate_rises() -> None:
    # A grey picture is off by about 0.1: an attack that never works would show nothing.
    assert _mse(1.0, 0.0, 0.01) < 0.03
    errors = [_mse(density, 0.01, 0.1) for density in (1.0, 0.3, 0.05)]
    assert errors[0] < 0.03 and 1.5 * errors[0] < errors[1] and 1.5 * errors[1] < errors[2]
    assert _mse(1.0, 1.0, 0.1, clip_norm=1.0) > 2 * errors[0], "the noise of a private run hides more"


@pytest.mark.parametrize("seed", [1, 2])
def test_the_linear_attack_is_no_better_than_its_bound(seed: int) -> None:
    for density in (0.9, 0.7, 0.5, 0.3, 0.1, 0.01):  # at 0.01 one pixel in ten has an equation
        found = attack_releases(LinearSettings(density=density, noise=0.1, pictures=4), seed)
        assert found.error >= found.bound > 0
    dense = attack_releases(LinearSettings(density=1.0, noise=0.1, pictures=4), seed)
    # 3136 trials: the mean squared error has a relative std of sqrt(2 / 3136) = 2.5 %. Noise of 2/3 would give 0.44.
    assert dense.solvable == 1 and dense.error / dense.bound == pytest.approx(1, abs=0.1)


def test_the_linear_attack_solves_what_has_no_noise_and_knows_what_it_cannot() -> None:
    constraint, inputs = np.array([0.5, -0.25, -0.25]), np.array([0.2, 0.9])
    gradient = np.concatenate([np.outer(constraint, inputs).reshape(-1), constraint])  # weights, then biases
    kept = np.array([0, 2, 7])  # both equations are of the first input; 7 is a bias
    solution, solved = solve(Release(kept, gradient[kept]), constraint, pixels=2)
    assert solution == pytest.approx([0.2, 0.0]) and solved.tolist() == [True, False]
    # Of 4 of 8 coordinates one is among the first three but in 5 of 70 cases.
    assert bound(2.0, 4, 8, constraint) == pytest.approx(65 / 70 * 4 / (0.5 * 0.375))


def tiny_pictures() -> Dataset:
    rng = np.random.default_rng(11)
    inputs = rng.integers(256, size=(30, 1, 5, 4)).astype(np.uint8)
    return Dataset(inputs, np.arange(30) % 10, inputs[:4], np.arange(4))


_TINY = "tests.simulations.test_attacks:tiny_pictures"


def test_the_linear_attack_without_noise_finds_the_pictures_of_the_seed_where_it_has_equations() -> None:
    told: list[float] = []
    settings = LinearSettings(density=0.2, noise=1e-4, dataset=_TINY, pictures=4)
    found = attack_releases(settings, 3, told.append)
    rows = np.random.default_rng(3).choice(30, 4, replace=False)
    assert told == [0.25, 0.5, 0.75, 1.0]
    assert found.pictures.originals == pytest.approx(tiny_pictures().train_inputs[rows, 0] / 255)
    off = np.abs(found.pictures.originals - found.pictures.found)
    assert (off < 6e-3).mean() == pytest.approx(found.solvable, abs=0.02) and 0.7 < found.solvable < 1
    assert found.error < 1e-5 and found.pictures.found[off >= 6e-3].max(initial=0) == 0
    assert found.bound == pytest.approx(bound(1e-4, 42, 210, np.full(10, 0.3)))
    assert found.figures["ratio"] == found.error / found.bound and found.figures["solvable"] == found.solvable
    assert invert_releases(_quick_inversion(), 3).originals == pytest.approx(found.pictures.originals)


def test_the_linear_attack_knows_ten_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_pictures()
    monkeypatch.setattr("common.datasets.load", lambda name: data)
    for wrong in (-1, 10):
        data.train_targets[:] = wrong
        with pytest.raises(ConfigError, match=f"expected targets from 0 to 9, got {wrong} in "):
            attack_releases(LinearSettings(density=1.0, noise=0.1, pictures=1), 1)


def _quick_inversion(**changes: Any) -> InversionSettings:
    small = {"density": 1.0, "noise_multiplier": 0.0, "dataset": _TINY, "model": "linear:20-10", "pictures": 4}
    return InversionSettings(**{**small, "iterations": 150, "step": 0.1, "smoothness": 0.0, **changes})


def test_gradients_are_matched_by_ever_smaller_steps() -> None:
    told: list[float] = []
    assert invert_releases(_quick_inversion(), 3, told.append).figures["mse"] < 0.01
    assert told == pytest.approx(np.arange(1, 151) / 150)
    assert invert_releases(_quick_inversion(density=0.7), 3).figures["mse"] < 0.01, "the mask is known"
    start = torch.rand(4, 1, 5, 4, generator=torch.Generator().manual_seed(3)).numpy()[:, 0]
    for iterations, moved in ((1, 0.01), (2, 0.015)):  # the second step is half of the first
        found = invert_releases(_quick_inversion(iterations=iterations, step=0.01), 3).found
        assert np.median(np.abs(found - start)) == pytest.approx(moved, rel=1e-3)
    wide = invert_releases(_quick_inversion(iterations=1, step=0.5), 3).found
    assert wide.min() == 0 and wide.max() == 1, "a picture stays one"
    flat = invert_releases(_quick_inversion(smoothness=100.0), 3).found
    assert np.abs(np.diff(flat, axis=1)).mean() < 0.03 > np.abs(np.diff(flat, axis=2)).mean()


def test_total_variation_is_of_neighbours_down_and_across() -> None:
    image = torch.tensor([[[0.0, 1.0, 0.5], [0.2, 0.2, 0.2]]])
    assert float(_total_variation(image)) == pytest.approx((0.2 + 0.8 + 0.3) / 3 + (1.0 + 0.5) / 4)
    assert float(_total_variation(torch.cat([image, image]))) == pytest.approx(2 * float(_total_variation(image)))


def test_a_release_is_the_gradient_clipped_and_with_noise_on_the_mask() -> None:
    picture, start = (tiny_pictures().train_inputs[7] / 255).astype(np.float32), np.zeros(210, np.float32)
    victim = Victim(picture, 7, start, 5, Workbench("cpu"))

    def question(**changes: Any) -> Question:
        return Question(
            **{"model": "linear:20-10", "density": 1.0, "noise_multiplier": 0.0, "clip_norm": 1.0, **changes}
        )

    constraint = np.full(10, 0.1)
    constraint[7] -= 1
    gradient = np.concatenate([np.outer(constraint, picture.reshape(-1)).reshape(-1), constraint])
    whole = victim.ask(question(), 1)
    assert whole.gradient == pytest.approx(gradient, abs=1e-6) and whole.kept.tolist() == list(range(210))
    half, again = (victim.ask(question(density=0.5), number) for number in (1, 2))
    assert half.gradient == pytest.approx(gradient[half.kept], abs=1e-6) and len(half.kept) == 105
    assert half.kept.tolist() != again.kept.tolist()
    clipped = victim.ask(question(noise_multiplier=1e-6, clip_norm=0.5), 1)
    assert clipped.gradient == pytest.approx(gradient / np.linalg.norm(gradient) / 2, abs=1e-5)
    noisy, same = (Victim(picture, 7, start, 5, Workbench("cpu")).ask(question(noise_multiplier=9.0), 3) for _ in "ab")
    assert noisy.gradient.std() == pytest.approx(9, rel=0.15) and (noisy.gradient == same.gradient).all()


def test_likeness_of_pictures() -> None:
    rng = np.random.default_rng(3)
    picture = rng.random((28, 28)).astype(np.float32)
    worse = np.clip(picture + 0.1 * rng.standard_normal((28, 28)), 0, 1).astype(np.float32)
    assert pictures.mean_squared_error(picture, picture) == 0
    assert pictures.peak_signal_to_noise(picture, picture) == float("inf")
    assert pictures.structural_similarity(picture, picture) == pytest.approx(1)
    assert 0.5 < pictures.structural_similarity(picture, worse) < 0.99
    assert pictures.structural_similarity(picture, worse) == pytest.approx(_similarity(picture, worse), rel=1e-6)
    dark, bright = np.full((28, 28), 0.2, np.float32), np.full((28, 28), 0.7, np.float32)
    assert pictures.mean_squared_error(dark, bright) == pytest.approx(0.25)
    assert pictures.peak_signal_to_noise(dark, bright) == pytest.approx(6.0206, abs=1e-4)
    # Of constants nothing but the means is left.
    assert pictures.structural_similarity(dark, bright) == pytest.approx((0.28 + 1e-4) / (0.53 + 1e-4), rel=1e-5)


def _similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Return the structural similarity, window by window of 11 x 11 pixels."""
    away = np.exp(-0.5 * np.square(np.arange(-5, 6) / 1.5))
    weights = np.outer(away, away) / away.sum() ** 2
    windows = [
        np.lib.stride_tricks.sliding_window_view(np.pad(each.astype(float), 5, "symmetric"), (11, 11))
        for each in (one, other)
    ]
    m1, m2 = ((weights * each).sum((2, 3), keepdims=True) for each in windows)
    s11, s22, s12 = (
        (weights * (windows[a] - (m1, m2)[a]) * (windows[b] - (m1, m2)[b])).sum((2, 3), keepdims=True)
        for a, b in ((0, 0), (1, 1), (0, 1))
    )
    above = (2 * m1 * m2 + 1e-4) * (2 * s12 + 9e-4)
    return float((above / ((m1**2 + m2**2 + 1e-4) * (s11 + s22 + 9e-4))).mean())


def test_settings_at_their_limits_and_their_defaults() -> None:
    least = {"density": 1.0, "noise_multiplier": 0.0, "smoothness": 0.0, "pictures": 1, "iterations": 1}
    assert InversionSettings(**least).density == 1.0  # type: ignore[arg-type]
    for name, wrong in (
        *(("density", 0.0), ("noise_multiplier", -0.1), ("smoothness", -0.1), ("pictures", 0), ("iterations", 0)),
        *(("clip_norm", 0.0), ("step", 0.0), ("density", 1.01)),
    ):
        with pytest.raises(ConfigError, match=f"expected .*{name.replace('_', '-')}"):
            InversionSettings(**{**least, name: wrong})  # type: ignore[arg-type]
    for wrong in ({"noise": 0.0}, {"pictures": 0}, {"density": 0.0}):
        with pytest.raises(ConfigError, match=f"expected .*{next(iter(wrong))}"):
            LinearSettings(**{"density": 1.0, "noise": 0.1, "pictures": 1, **wrong})  # type: ignore[arg-type]
    for wrong in ({"canaries": 0}, {"phrases": 0}, {"insertions": -1}):
        with pytest.raises(ConfigError, match=f"expected {next(iter(wrong))} of at least"):
            canaries.CanarySettings(**{"canaries": 1, "phrases": 1, "insertions": 0, **wrong})
    assert defaults_of(canaries.CanarySettings) == {"canaries": 1000, "insertions": 3, "phrases": 10_000}
    assert defaults_of(LinearSettings) == {"dataset": "fashion-mnist-12k", "pictures": 16}
    assert defaults_of(InversionSettings) == {
        "clip-norm": 1.0,
        "dataset": "fashion-mnist-12k",
        "model": "dp-cnn-s",
        "pictures": 8,
        "iterations": 800,
        "step": 0.1,
        "smoothness": 0.1,
    }


def test_settings_are_checked() -> None:
    settings = parse_settings(InversionSettings, {"density": 1, "noise-multiplier": 0.5})
    assert settings == InversionSettings(density=1.0, noise_multiplier=0.5)
    assert parse_settings(InversionSettings, as_mapping(settings)) == settings
    for given, message in (
        ({"density": 0.5}, "'noise-multiplier' is missing"),
        ({"density": 1.5, "noise-multiplier": 0.0}, r"expected 0 < density <= 1, got 1\.5"),
        ({"density": 0.5, "noise-multiplier": -1.0}, r"noise-multiplier of at least 0, got -1\.0"),
        ({"density": 0.5, "noise-multiplier": 0.0, "pictures": 2.5}, r"expected pictures of type int, got 2\.5"),
        ({"density": 0.5, "noise": 0.0}, "unknown setting 'noise': expected density, noise-multiplier"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_settings(InversionSettings, given)


def test_a_picture_in_the_page_is_a_png_of_its_values() -> None:
    picture = np.array([[0.0, 0.5, 1.0], [2.0, -1.0, 0.2]], np.float32)
    data = base64.b64decode(data_uri(picture).removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length) == (zlib.crc32(kind + body),)
        chunks[kind], at = body, at + 12 + length
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (3, 2, 8, 0, 0, 0, 0)
    assert list(zlib.decompress(chunks[b"IDAT"])) == [0, 0, 128, 255, 0, 255, 0, 51]


_ATTACK = f"""\
title = "tiny"
source = "none"
measure = "inversion"
metrics = ["mse", "psnr"]
seeds = [4, 5]
minutes = 1
[settings]
dataset = "{_TINY}"
model = "linear:20-10"
pictures = 3
[grid.noise]
none = {{ noise-multiplier = 0.0, clip-norm = 2.0 }}
some = {{ noise-multiplier = 0.25, clip-norm = 2.0 }}
free = {{ noise-multiplier = 0.25 }}
[grid.density]
few = {{ density = 0.1 }}
all = {{ density = 1.0 }}
"""


def test_a_page_has_a_chart_for_each_figure_and_a_sheet_for_each_protection(tmp_path: Path) -> None:
    path, page = tmp_path / "tiny.toml", tmp_path / "new" / "folder" / "page.html"
    path.write_text(_ATTACK)
    experiment = load(path)
    by_name = {case.name: case for case in experiment.cases}
    with Results(None) as results:
        for name, seed, mse in (("none-few", 4, 0.25), ("none-few", 5, 0.75), ("some-all", 4, 0.125)):
            results.keep(experiment, by_name[name], seed, {"mse": mse, "psnr": 7.0}, 1.0)
        for name, seeds in (("none-few", (4, 5)), ("free-all", (4,))):  # the latter has no result
            for seed in seeds:
                values = np.linspace(0, 1, 10 * 20, dtype=np.float32).reshape(10, 5, 4)
                Inversion(values, values[::-1] / seed).save(Task(experiment, by_name[name], seed).folder(tmp_path))
        write_page(experiment, results, tmp_path, page)
        text = page.read_text()
        first = replace(experiment, seeds=(4,), quick=True)
        with Results(None) as others:
            others.keep(first, first.cases[0], 4, {"mse": 0.5}, 1.0)
            write_page(first, others, tmp_path, page)
            glance = page.read_text()
    rows = re.findall(r"<tr><td>([^<]*)</td>" + r'<td class="number">([^<]*)</td>' * 3, text)
    assert rows == [
        ("neither clipping nor noise", "1", "-", "-"),
        ("neither clipping nor noise", "0.1", "0.5000", "7.0"),
        ("noise of std 0.5, clip norm 2", "1", "0.1250", "7.0"),
        ("noise of std 0.5, clip norm 2", "0.1", "-", "-"),
        ("noise of std 0.25", "1", "-", "-"),
        ("noise of std 0.25", "0.1", "-", "-"),
    ]
    assert text.count("<svg") == 2 and text.count("bars: its standard error") == 2
    assert text.count('class="error"') == 1 and text.count("<p>No pictures yet.</p>") == 2
    assert [text.count(f'alt="{row}, picture ') for row in ("what the sites hold", "density 0.1", "density 1")] == [
        8,
        8,
        0,
    ]
    shown = re.findall(r'alt="density 0.1, picture (\d)" [^>]* src="([^"]*)"', text)
    values = np.linspace(0, 1, 200, dtype=np.float32).reshape(10, 5, 4)
    assert shown == [(str(number), data_uri(values[10 - number] / 4)) for number in range(1, 9)]
    assert "pictures of seed 4." in text and "badge" not in text.partition("<body")[2]
    assert "a glance: 3 pictures, 1 seed<" in glance and "standard error" not in glance


def test_the_command_writes_a_page_with_the_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["attack", "linear", "--quick", "--in-process", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    bars = [
        re.fullmatch(r"BAR experiment=linear/\S+ paper=1 ours=(\S+) sem=none seeds=1", line) for line in lines[-12:]
    ]
    assert all(bar is not None and float(bar[1]) > 0.9 for bar in bars)
    page = (tmp_path / "quick" / "linear" / "linear.html").read_text()
    # Of two pictures: the originals and six densities for each of two noise levels.
    assert page.count("<img ") == page.count('src="data:image/png;base64,') == 2 * 7 * 2
    assert page.count("<svg") == 4 and page.count('<circle class="point"') == 4 * 2 * 6
    assert "a glance: 2 pictures, 1 seed<" in page and "standard error" not in page, "one seed has none"
    assert "so more is safer" in page and "Each pixel of a picture is one trial" in page
    assert not re.search(r"https?://|@import|url\(|<script|<link", page)
    assert cli.main(arguments) == 0
    assert "12 of 12 runs were done already" in capsys.readouterr().out
    with Results(
        tmp_path / "quick" / RESULTS
    ) as results:  # the full attack has other settings: these are not its pictures
        write_page(load(find("linear")), results, tmp_path / "quick", tmp_path / "other.html")
    assert "<img " not in (tmp_path / "other.html").read_text()


class _Words(nn.Module):
    """Embeddings of 40 words; a record is a word, one near it, and negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 12)
        nn.init.normal_(self.embedding.weight, std=0.3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(inputs.long())
        return torch.einsum("bw,bcw->bc", embedded[:, 0], embedded[:, 1:])

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        right = nn.functional.one_hot(targets, outputs.shape[1]).float()
        return nn.functional.binary_cross_entropy_with_logits(outputs, right, reduction="none").sum(1)


def words_model() -> nn.Module:
    return _Words()


def words_dataset() -> Dataset:
    inputs = np.random.default_rng(5).integers(40, size=(600, 6)).astype(np.float32)
    return Dataset(inputs, np.zeros(600, np.int64), inputs[:50], np.zeros(50, np.int64))


def _canaries(tmp_path: Path, **changes: ConfigValue) -> dict[str, float]:
    settings: dict[str, ConfigValue] = {
        "dataset": "tests.simulations.test_attacks:words_dataset",
        "model": "tests.simulations.test_attacks:words_model",
        "sites": 1,
        "rounds": 2,
        "steps-per-round": 40,
        "sampling-rate": 0.2,
        "learning-rate": 2.0,
        "final-density": 1.0,
        "canaries": 60,
        "insertions": 3,
        "phrases": 200,
        **changes,
    }
    measure = MEASURES["canaries"]
    measure.check(settings)
    return measure.carry_out(settings, 1, tmp_path / "run", lambda share: None)


def test_canaries_are_memorised_without_privacy_and_not_with_it(tmp_path: Path) -> None:
    # Of 60 phrases that left no trace, the distance is 9 / 60 = 0.15 on average.
    plain = _canaries(tmp_path / "plain", private=False)
    assert plain["uniform_distance"] > 1.2 and plain["control_distance"] < 0.5
    private = _canaries(tmp_path / "private", **{"noise-multiplier": 20.0})
    assert private["uniform_distance"] < 0.5 and private["exposure"] < plain["exposure"] - 1
    assert not (tmp_path / "plain" / "run-data.npz").exists()
    with pytest.raises(ConfigError, match="expected a model with word embeddings"):
        _canaries(tmp_path / "other", model="linear:6-2")


def test_ranks_are_shares_of_less_likely_phrases() -> None:
    rng = np.random.default_rng(0)
    embedding = np.zeros((10, 10), np.float32)
    phrases = canaries.random_phrases(2000, 10, rng)
    assert canaries.uniform_distance(canaries.ranks(embedding, phrases, 50, rng)) < 0.015, "a model that knows nothing"
    embedding[[1, 2, 3], 0] = 5.0  # words that go together
    likely, unlikely = canaries.ranks(embedding, np.array([[1, 2, 3], [1, 5, 6]]), 500, rng)
    assert likely > 0.85 > unlikely
    assert canaries.uniform_distance(np.full(100, 0.95)) == pytest.approx(9)
    assert canaries.uniform_distance((np.arange(100) + 0.5) / 100) == pytest.approx(0)
    assert canaries.exposure(np.array([0.99999, 0.0]), 1023) == pytest.approx((10 + 0) / 2)


def test_ranks_are_by_the_likelihood_of_the_second_and_the_third_word() -> None:
    rng = np.random.default_rng(4)
    vectors = rng.standard_normal((9, 3))
    phrases = canaries.random_phrases(6, 9, rng)

    def logs(context: np.ndarray) -> np.ndarray:
        likelihoods = np.exp(vectors @ context)
        return np.log(likelihoods / likelihoods.sum())

    for (a, b, c), found in zip(phrases, canaries.ranks(vectors, phrases, 40_000, rng), strict=True):
        table = np.array([logs(vectors[a])[i] + logs((vectors[a] + vectors[i]) / 2) for i in range(9)])
        below, same = (table < table[b, c] - 1e-9).mean(), (np.abs(table - table[b, c]) <= 1e-9).mean()
        assert below - 0.01 < found < below + same + 0.01


def test_canaries_need_records_of_a_word_a_neighbour_and_negatives() -> None:
    words, phrase = words_dataset(), np.array([[7, 8, 9]])
    few = Dataset(words.train_inputs[:, :3], words.train_targets, words.test_inputs, words.test_targets)
    found = canaries.with_canaries(few, phrase, 50, 2, seed=1)
    assert found.train_inputs[:, :2].max() == 39 and found.train_inputs.shape == (900, 3)
    added = found.train_inputs[(found.train_inputs[:, 0] == 7) & (found.train_inputs[:, 1] == 8)]
    assert len(added) >= 50 and set(added[:, 2].tolist()) >= {0.0, 1.0} and (added[:, 2] < 2).sum() >= 50
    assert not (found.train_inputs[:600] == few.train_inputs).all(), "in a random order"
    for inputs in (words.train_inputs[:, :2], words.train_inputs[:, :, None]):
        with pytest.raises(ConfigError, match="expected records of a word"):
            canaries.with_canaries(
                Dataset(inputs, words.train_targets, inputs[:50], words.test_targets), phrase, 1, 2, seed=1
            )


def test_canaries_are_records_of_every_ordered_pair() -> None:
    phrase = np.array([[7, 8, 9]])
    data = canaries.with_canaries(words_dataset(), phrase, 2, 40, seed=1)
    assert len(data.train_inputs) == len(data.train_targets) == 600 + 2 * 6
    pairs = [tuple(record[:2]) for record in data.train_inputs.astype(int).tolist()]
    before = [tuple(record[:2]) for record in words_dataset().train_inputs.astype(int).tolist()]
    for pair in ((7, 8), (8, 7), (7, 9), (9, 7), (8, 9), (9, 8)):
        assert pairs.count(pair) == before.count(pair) + 2
