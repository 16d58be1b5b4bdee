"""Attacks on real releases: they succeed where nothing protects, and less where more does."""

import base64
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from common.config import ConfigValue
from common.datasets import Dataset
from common.errors import ConfigError
from simulations import cli
from simulations.attacks import canaries, pictures
from simulations.attacks.inversion import InversionSettings, invert_releases
from simulations.attacks.linear import LinearSettings, attack_releases, bound, solve
from simulations.attacks.page import data_uri, write_page
from simulations.attacks.settings import as_mapping, parse_settings
from simulations.attacks.victim import Release
from simulations.experiments.definition import find, load
from simulations.experiments.measures import MEASURES
from simulations.experiments.results import Results
from simulations.experiments.runner import RESULTS


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


def test_likeness_of_pictures() -> None:
    rng = np.random.default_rng(3)
    picture = rng.random((28, 28)).astype(np.float32)
    worse = np.clip(picture + 0.1 * rng.standard_normal((28, 28)), 0, 1).astype(np.float32)
    assert pictures.mean_squared_error(picture, picture) == 0
    assert pictures.peak_signal_to_noise(picture, picture) == float("inf")
    assert pictures.structural_similarity(picture, picture) == pytest.approx(1)
    assert 0.5 < pictures.structural_similarity(picture, worse) < 0.99
    dark, bright = np.full((28, 28), 0.2, np.float32), np.full((28, 28), 0.7, np.float32)
    assert pictures.mean_squared_error(dark, bright) == pytest.approx(0.25)
    assert pictures.peak_signal_to_noise(dark, bright) == pytest.approx(6.0206, abs=1e-4)
    # Of constants nothing but the means is left.
    assert pictures.structural_similarity(dark, bright) == pytest.approx((0.28 + 1e-4) / (0.53 + 1e-4), rel=1e-5)


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


def test_canaries_are_records_of_every_ordered_pair() -> None:
    phrase = np.array([[7, 8, 9]])
    data = canaries.with_canaries(words_dataset(), phrase, 2, 40, seed=1)
    assert len(data.train_inputs) == len(data.train_targets) == 600 + 2 * 6
    pairs = [tuple(record[:2]) for record in data.train_inputs.astype(int).tolist()]
    before = [tuple(record[:2]) for record in words_dataset().train_inputs.astype(int).tolist()]
    for pair in ((7, 8), (8, 7), (7, 9), (9, 7), (8, 9), (9, 8)):
        assert pairs.count(pair) == before.count(pair) + 2
