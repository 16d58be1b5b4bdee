"""The benchmarks that the docs name: each does all of its work, on little of it, and ends with its BAR line."""

import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from simulations.benchmarks import coding, methods, simulation, step, step_race

Bars = Callable[..., dict[str, float]]


@pytest.fixture
def bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bars:
    """Return a function that runs a benchmark with options and returns the figures of its last line."""

    def run(main: Callable[[], object], *options: str) -> dict[str, float]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["benchmark", *options])
        assert not main(), capsys.readouterr().err
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("BAR ")
        figures = {name: float(value) for name, value in (pair.split("=") for pair in last.split()[1:])}
        assert all(math.isfinite(value) for value in figures.values()), last
        return figures

    return run


def test_bench_coding(bars: Bars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "_SIZES", (5000,))
    monkeypatch.setattr(coding, "_LEAST_TURNS", 1)
    monkeypatch.setattr(coding, "_CELL_SECONDS", 0.0)
    figures = bars(coding.main)
    assert figures.keys() == {"over_entropy", "mcoords_per_s", "index_over_entropy"}
    # The entropy is that of so few values themselves: a coder that knows only their distribution cannot be below it.
    assert 1 < figures["over_entropy"] < 1.5 and 1 < figures["index_over_entropy"] < 2


def test_bench_methods(bars: Bars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_TRIES", 1)
    small = {"choosing": {"size": 2000, "picks": 10}, "recovering": {"size": 500, "sparsity": 5}}
    for name, sizes in {**small, "accounting": {"sites": 200}}.items():
        monkeypatch.setattr(methods, name, partial(getattr(methods, name), **sizes))
    assert bars(methods.main).keys() == {f"{name}_cpu_seconds" for name in (*small, "accounting")}


def test_bench_step(bars: Bars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_QUICK_CELLS", {"mlp": [(4, 0.5)]})
    for name in ("_TURNS", "_MOST_TURNS"):
        monkeypatch.setattr(step_race, name, 1)
    figures = bars(step.main, "--quick", "--models", "mlp")
    assert figures.keys() == {"worst_vs_best_peer", "mlp"} and min(figures.values()) > 0


def test_bench_simulation_and_it_joins_no_ray_that_it_did_not_start(
    bars: Bars, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray_folder = Path(os.environ["RAY_TMPDIR"], "b")  # short, as sockets need it
    monkeypatch.setenv("RAY_TMPDIR", str(ray_folder))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    (ray_folder / "ray").mkdir(parents=True)
    (ray_folder / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    figures = bars(simulation.main, "--quick", "--rounds", "1", "--sites", "2")
    assert figures.keys() == {"cpu_vs_bare_loop", "cpu_vs_flower", "overhead_ms_per_site"}
