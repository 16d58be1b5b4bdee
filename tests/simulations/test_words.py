"""Figures in words: what each is, and where one way of writing it goes over into the next."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulations.report import load_run, words
from tests.run_logs import end_event, finished_run, public_run, round_event, start_event, write_log


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (words.percent, None, "\N{EN DASH}"),
        (words.percent, 0.12345, "12.3 %"),
        (words.percent_tick, 0.125, "12.5 %"),
        (words.epsilon, None, "\N{EN DASH}"),
        (words.epsilon, 1.0, "1.00"),
        (words.epsilon, 1.0000001, "1.01"),
        (words.epsilon, math.inf, "infinite"),
        (words.in_bytes, 999.4, "999 B"),
        (words.in_bytes, 999.5, "1 kB"),
        (words.in_bytes, 999_499, "999 kB"),
        (words.in_bytes, 999_500, "1 MB"),
        (words.in_bytes, 12_340_000_000, "12.3 GB"),
        (words.in_bytes, 1.2346e15, "1235 TB"),
        (words.bits, None, "\N{EN DASH}"),
        (words.bits, 3.0625, "3.06 bits"),
        (words.loss, None, "\N{EN DASH}"),
        (words.loss, 0.123456, "0.1235"),
        (words.duration, 59.9, "59.9 s"),
        (words.duration, 60, "1 min 0 s"),
        (words.duration, 3599, "59 min 59 s"),
        (words.duration, 3600, "1 h 0 min"),
        (words.duration, 7384, "2 h 3 min"),
        (words.saving, 0.995, "1.01x more than dense"),
        (words.saving, 0.9951, "as much as dense"),
        (words.saving, 1.0049, "as much as dense"),
        (words.saving, 1.005, "1x less than dense"),
        (words.saving, 0.25, "4x more than dense"),
        (words.saving, 15.04, "15x less than dense"),
        (words.chance, 1e-5, "1 in 100,000"),
        (words.chance, 0.5, "1 in 2"),
        (words.chance, 1.0, "1"),
        (words.chance, 0.0, "0"),
        (words.chance, 0.4, "0.4"),
        (words.chance, 3e-6, "3e-06"),
    ],
)
def test_figures_in_words(write: Callable[[Any], str], value: float | None, text: str) -> None:
    assert write(value) == text


@pytest.mark.parametrize(
    ("cost", "dense", "text"),
    [
        (0, 8, "nothing sent yet"),
        (8, 0, "nothing sent yet"),
        (2, 8, "4x less than dense"),
        (8, 2, "4x more than dense"),
    ],
)
def test_bytes_against_dense(cost: int, dense: int, text: str) -> None:
    assert words.against_dense(cost, dense) == text


def test_what_a_run_is_called_and_promises(tmp_path: Path) -> None:
    private, public = load_run(finished_run(tmp_path / "a")), load_run(public_run(tmp_path / "b"))
    strange = load_run(finished_run(tmp_path / "c", config={"method": "of tomorrow", "delta": None}))
    assert words.method(private).startswith("random: ") and words.method(strange) == "of tomorrow"
    assert words.lacks(public) == words.lacks(strange) == "no clipping, no noise"
    clipped = load_run(finished_run(tmp_path / "e", private=False, config={"method": "clip-only"}))
    assert words.lacks(clipped) != words.lacks(public)
    assert words.guarantee(private) == "at (epsilon 6.00, delta 1e-05) per record"
    assert words.guarantee(strange) == "at (epsilon 6.00, delta \N{EN DASH}) per record"
    assert words.guarantee(public) == "without any privacy"
    coded = load_run(finished_run(tmp_path / "d", grid_entropy_bits=None, value_coding="f16"))
    assert words.bits_note(private).startswith("calibrated, noise alone takes 3.06 bits; 2.05 bits per parameter")
    assert words.bits_note(coded).startswith("f16; 2.05 bits per parameter")
    assert words.warning([private]) == "" and words.warning([public, public]) == "not private"
    assert words.warning([private, public]) == "1 of 2 not private"


@pytest.mark.parametrize(
    ("epochs", "kept", "text"),
    [
        ([0, 0], [500, 500], "One mask keeps 500 of 1,000 parameters."),
        ([0, 1], [500, 500], "A new mask every round, each of 500 of 1,000 parameters."),
        ([0, 1], [600, 500], "A new mask every round: from 600 of 1,000 parameters to 500."),
        ([0, 0, 0, 1], [600, 600, 600, 500], "A new mask every 2 rounds: from 600 of 1,000 parameters to 500."),
    ],
)
def test_the_schedule_in_words(epochs: list[int], kept: list[int], text: str, tmp_path: Path) -> None:
    rounds = [
        round_event(number, epoch=epoch, kept=keeps)
        for number, (epoch, keeps) in enumerate(zip(epochs, kept, strict=True), start=1)
    ]
    assert words.schedule(load_run(write_log(tmp_path / "a", start_event(), rounds, None))) == text


def test_the_best_of_several_runs(tmp_path: Path) -> None:
    def run(name: str, **end: Any) -> Any:
        rounds = [round_event(1)]
        finished = end_event(1, **end) if end else None
        return load_run(write_log(tmp_path / name, start_event(name=name), rounds, finished))

    better, worse = run("better", accuracy=0.8, uplink=5000), run("worse", accuracy=0.7, uplink=4000)
    least, most = run("least", accuracy=None, loss=0.1), run("most", accuracy=None, loss=0.9)
    silent = run("silent", accuracy=None, loss=None, uplink=0)
    text = words.comparison_headline([worse, better, most, least, silent, run("unfinished")])
    assert text.startswith("Highest accuracy with privacy: better, 80.0 % at (epsilon 6.00")
    assert "; lowest test loss with privacy: least, 0.1 at (" in text
    assert "; least uplink: worse, 4 kB, 2.1x less than dense" in text
    nothing = write_log(tmp_path / "nothing", start_event(initial_accuracy=None, initial_loss=None), [], None)
    assert words.comparison_headline([load_run(nothing)]) == "Nothing measured yet"
    assert words.spent(load_run(nothing)) == "0.00"
