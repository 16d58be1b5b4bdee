"""What a person sees while a simulation runs."""

import io
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from simulations.progress import RunDisplay
from simulations.run import Engine, config_with, simulate
from tests.run_logs import round_event, start_event
from tests.support import small_config


def shown(*events: dict[str, Any], terminal: bool = False, **config: Any) -> str:
    """Return what is said of these events, without its line breaks."""
    screen = Console(file=io.StringIO(), width=300 if terminal else 60, force_terminal=terminal, color_system=None)
    with RunDisplay(config_with({"rounds": 4, "name": "x", **config}), screen) as display:
        for event in events:
            display.show(event)
    return screen.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def start(**changes: Any) -> dict[str, Any]:
    return {"event": "run", "published_epsilon": None, **start_event(**changes)}


def a_round(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {"event": "round", **round_event(number, **changes)}


def test_a_run_begins_with_its_promise() -> None:
    assert shown(start()) == (
        "cooling: 2 sites, 1,000 parameters, epsilon 7 at delta 1e-05 per record (add or remove one record; noise "
        "multiplier 1.127)\n"
    )
    assert "1,000 parameters, NOT PRIVATE\n" in shown(start(private=False))
    assert "\nthe paper's own accounting would say epsilon 0.25\n" in shown(start(published_epsilon=0.25))
    assert "\nno noise to calibrate to: values travel as f16\n" in shown(start(value_coding="f16"))
    assert "travel as" not in shown(start(value_coding="f16"), **{"value-coding": "f16"})


def test_a_line_for_every_round_adds_up_what_was_sent() -> None:
    assert shown(a_round(1), a_round(2)).splitlines() == [
        f"round {number}/4: accuracy {50 + number}.00%, epsilon {1.5 * number:.2f}, up {up} kB, saving 2.0x, per "
        f"record; 3.1 bits a value, 2.05 bits a parameter, density 0.5, down {down} kB; noise alone 3.06 bits a value"
        for number, up, down in ((1, "4.2", "8.1"), (2, "8.4", "16.2"))
    ]
    assert "noise alone" not in shown(a_round(), **{"value-coding": "f32"})
    public = shown(a_round(epsilon=None))
    assert "accuracy 51.00%, not private, up" in public and "per record" not in public
    assert "round 1/4: loss 0.1235, epsilon" in shown(a_round(accuracy=None, loss=0.123456))
    nothing = dict.fromkeys(("index", "values", "header", "framing"), 0)
    assert ", up 0 B, saving 8400.0x," in shown(a_round(uplink=nothing))
    assert "round 1/4: no accuracy, epsilon" in shown(a_round(accuracy=None, loss=None))


def test_a_run_that_goes_on_goes_on_counting() -> None:
    before = {"event": "resume", "round": 3, "uplink": 1000, "downlink": 2000, "dense_uplink": 10_000}
    first, second = shown(before, a_round(3)).splitlines()
    assert first == "x: going on at round 3"
    assert "up 5.2 kB, saving 3.5x" in second and "down 10.1 kB" in second


def test_what_went_wrong_in_a_round_is_said() -> None:
    rejections = [{"site": 3, "reason": "cannot read [/data]"}]
    lines = shown(a_round(rejections=rejections, abandoned=True, admitted=1)).splitlines()
    assert lines[1:] == [
        "round 1: site 3 rejected: cannot read [/data]",
        "round 1 abandoned: 1 replies, model unchanged",
    ]
    assert len(shown(a_round()).splitlines()) == 1


def test_a_terminal_has_a_bar_instead_of_lines() -> None:
    text = shown(start(), a_round(3), terminal=True)
    assert "round 3/4:" not in text and "accuracy 53.00%, epsilon 4.50" in text
    assert re.search("round 3/4 \N{BOX DRAWINGS HEAVY HORIZONTAL}{6} {3}accuracy 53.*saving 2.0x +--:--\n", text)
    before = {"event": "resume", "round": 3, "uplink": 0, "downlink": 0, "dense_uplink": 0}
    assert "2/4" in shown(before, terminal=True)


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupted_run_says_how_it_goes_on(begun: bool, tmp_path: Path) -> None:
    screen = Console(file=io.StringIO(), width=300)
    with RunDisplay(config_with({"out": str(tmp_path)}), screen) as display:
        if begun:
            display.show(start(name="mine"))
        display.interrupted()
    said = f"go on with: fedsieve simulate --resume {tmp_path / 'mine'}" if begun else "nothing was written"
    assert screen.file.getvalue().splitlines()[-1].endswith(said)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "shown", "line"),
    [
        ({"accuracy": 0.5, "loss": 0.25}, "test accuracy 50.00%", "accuracy=0.5000 epsilon="),
        ({"accuracy": None, "loss": 0.25}, "test loss 0.25", "accuracy=none loss=0.2500 epsilon="),
        ({"accuracy": None, "loss": None}, "test accuracy not measured", "accuracy=none epsilon="),
        ({"epsilon": None}, "privacy NOT PRIVATE: no clipping, no noise", "epsilon=none uplink_saving="),
        ({"epsilon": 2.001}, "privacy epsilon 2.01 at delta 1e-05, per record (add", "epsilon=2.0010 uplink_saving="),
    ],
)
def test_the_end_in_words_and_as_a_line_for_scripts(
    changes: dict[str, Any],
    shown: str,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config(tmp_path, rounds=1)
    result = replace(simulate(config, Engine(in_process=True)), **changes)
    screen = Console(file=io.StringIO(), width=300)
    with RunDisplay(config, screen) as display:
        now = time.monotonic()
        monkeypatch.setattr("simulations.progress.time", SimpleNamespace(monotonic=lambda: now + 1000))
        display.finished(result, tmp_path / "report.html")
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("test ")
    words = " ".join(text.split())
    assert shown in words and " time 1000." in words and f"report {tmp_path / 'report.html'}" in words
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("BAR accuracy=") and line in last and f"uplink_saving={result.uplink_saving:.3f}" in last
