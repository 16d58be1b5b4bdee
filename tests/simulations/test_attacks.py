"""Attacks on real releases: they succeed where nothing protects, and less where more does."""

import base64
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from simulations import cli
from simulations.attacks import pictures
from simulations.attacks.inversion import InversionSettings, invert_releases
from simulations.attacks.linear import LinearSettings, attack_releases, bound, solve
from simulations.attacks.page import data_uri
from simulations.attacks.settings import as_mapping, parse_settings
from simulations.attacks.victim import Release

_TRIES = {"pictures": 2, "iterations": 120, "step": 0.1}


def _mse(density: float, noise: float, smoothness: float, seed: int = 1) -> float:
    settings = InversionSettings(density=density, noise_multiplier=noise, smoothness=smoothness, **_TRIES)  # type: ignore[arg-type]
    return invert_releases(settings, seed).figures["mse"]


def test_inversion_succeeds_without_protection_and_fails_more_as_the_rate_rises() -> None:
    plain = _mse(1.0, 0.0, 0.01)
    assert plain < 0.02, "an attack that never works shows nothing"
    errors = [_mse(density, 0.01, 0.1) for density in (1.0, 0.3, 0.05)]
    assert plain < errors[0] < errors[1] < errors[2]
    assert _mse(1.0, 1.0, 0.1) > errors[0], "more noise hides more"


@pytest.mark.parametrize("seed", [1, 2])
def test_the_linear_attack_is_no_better_than_its_bound(seed: int) -> None:
    for density in (0.9, 0.7, 0.5, 0.3, 0.1):
        found = attack_releases(LinearSettings(density=density, noise=0.1, pictures=4), seed)
        assert found.error >= found.bound == pytest.approx(0.1**2 / (density * 0.9))
    dense = attack_releases(LinearSettings(density=1.0, noise=0.1, pictures=4), seed)
    # 3136 trials: the mean squared error has a relative std of sqrt(2 / 3136) = 2.5 %. Noise of 2/3 would give 0.44.
    assert dense.solvable == 1 and dense.error / dense.bound == pytest.approx(1, abs=0.1)


def test_the_linear_attack_solves_what_has_no_noise_and_knows_what_it_cannot() -> None:
    constraint, inputs = np.array([0.5, -0.25, -0.25]), np.array([0.2, 0.9])
    gradient = np.concatenate([np.outer(constraint, inputs).reshape(-1), constraint])  # weights, then biases
    kept = np.array([0, 2, 7])  # both equations are of the first input; 7 is a bias
    solution, solved = solve(Release(kept, gradient[kept]), constraint, pixels=2)
    assert solution == pytest.approx([0.2, 0.0]) and solved.tolist() == [True, False]
    assert bound(2.0, 0.5, constraint) == pytest.approx(4 / (0.5 * 0.375))


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
    assert page.count("<svg") == 3 and page.count('<circle class="point"') == 3 * 2 * 6
    assert not re.search(r"https?://|@import|url\(|<script|<link", page)
    assert cli.main(arguments) == 0
    assert "12 of 12 runs were done already" in capsys.readouterr().out
