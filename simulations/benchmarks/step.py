"""What one private training step costs with our engine, against plain SGD and against everybody else's.

``python -m simulations.benchmarks.step [--quick] [--models NAME ...]``

A step is the forward pass, the sum of the clipped gradients and the update of the parameters, in one thread, without
noise and without loading data. All methods of a cell (model, batch size, density) take turns in one process; each must
first give the clipped sum that ours gives. Times are CPU times, ratios medians over the turns: at least seven, but
three or one for peers whose steps are long and far from the fastest. For densities below one, peers mask their
per-sample gradients before they clip them; ghost clipping has none, so it runs dense and is checked against our dense
sum. Pictures can lie in memory in two layouts: each peer runs in the faster one, ours and the plain SGD that it is
compared with channels last.

The peak memory of each method is measured in a process of its own, from before the model is built.
"""

import argparse
import json
import platform
import statistics
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from client.memory import keep_freed_memory
from common.errors import FedsieveError
from simulations.benchmarks.step_memory import peak_apart
from simulations.benchmarks.step_methods import CHANNELS_LAST, NCHW
from simulations.benchmarks.step_models import MODELS, Model
from simulations.benchmarks.step_peers import METHODS, OURS, PEERS, PLAIN, PLAIN_NCHW
from simulations.benchmarks.step_race import Cell, Race

_OUT = Path("runs/benchmarks/step.json")
_CELLS = [(batch, density) for batch in (64, 256, 1000) for density in (1.0, 0.5, 0.1)]
_QUICK_CELLS = {
    "dp-cnn-s": [(64, 1.0), (64, 0.5), (256, 1.0), (256, 0.5)],
    "dp-cnn": [(64, 0.5)],
    "mlp": [(64, 1.0), (64, 0.5)],
    "embedding": [(64, 1.0), (64, 0.5)],
}
_MEMORY_BATCH, _MEMORY_DENSITIES = 256, (1.0, 0.5)


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak memory of a method at a batch of 256."""

    model: str
    method: str
    density: float
    bytes: int


def _measure_memory(cells: list[Cell], status: Status) -> list[Peak]:
    """Measure every method that ran at the batch size in question, in the memory layout that it ran in."""
    peaks = []
    for cell in cells:
        if cell.batch == _MEMORY_BATCH and cell.density in _MEMORY_DENSITIES:
            for method in cell.seconds:
                status.update(f"{cell.model}, density {cell.density:g}: peak memory of {method}")
                size = peak_apart(cell.model, method, cell.batch, cell.density, cell.layouts[method])
                peaks.append(Peak(cell.model, method, cell.density, size))
    return peaks


def _table(model: Model, cells: list[Cell], peaks: list[Peak]) -> Table:
    shown = [name for name in METHODS if name != PLAIN and (name != PLAIN_NCHW or model.pictures)]
    title = f"{model.name}: a step's time, and its memory at a batch of {_MEMORY_BATCH}, over plain SGD's"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("batch", "density", "plain SGD"):
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for name in shown:
        table.add_column(name.replace(" ", "\n"), justify="right", style="bold" if name == OURS else "")
    for cell in cells:
        plain = f"{1000 * statistics.median(cell.seconds[PLAIN]):.1f} ms"
        table.add_row(f"{cell.batch}", f"{cell.density:g}", plain, *(_entry(cell, name) for name in shown))
    for density in _MEMORY_DENSITIES:
        sizes = {peak.method: peak.bytes for peak in peaks if peak.density == density}
        if sizes:
            entries = [f"{sizes[name] / sizes[PLAIN]:.2f}" if name in sizes else "-" for name in shown]
            table.add_row("memory", f"{density:g}", f"{sizes[PLAIN] / 1e6:.0f} MB", *entries)
    return table


def _entry(cell: Cell, name: str) -> str:
    if name in cell.missing:
        return f"[dim]{cell.missing[name]}[/dim]"
    text = f"{cell.ratio(name):.2f}" + ("*" if not METHODS[name].masks and name in PEERS and cell.density < 1 else "")
    return f"[green]{text}[/green]" if name == cell.best_peer else text


def _notes(model: Model, cells: list[Cell]) -> str:
    notes = "Green: the fastest peer. *: dense, it cannot mask."
    if not model.pictures:
        return notes
    ran = {name for cell in cells for name in PEERS if cell.layouts.get(name) == CHANNELS_LAST}
    return (
        f"{notes} Channels last was the faster layout for {', '.join(sorted(ran)) or 'no peer'}, in one cell or more; "
        f"Opacus hooks and ghost give wrong gradients in it, so they run {NCHW}."
    )


def _bar(cells: list[Cell]) -> dict[str, float]:
    """Return the numbers of the last line: ours over the best peer at worst, then over plain SGD's by model."""
    bar = {"worst_vs_best_peer": max(cell.ratio(OURS, cell.best_peer) for cell in cells)}
    for model in MODELS.values():
        ratios = [cell.ratio(OURS) for cell in cells if cell.model == model.name]
        if model.bar_name and ratios:
            bar[model.bar_name] = max(ratios)
    return bar


def _save(cells: list[Cell], peaks: list[Peak], bar: dict[str, float]) -> None:
    report: dict[str, Any] = {
        "versions": {name: _version(name) for name in ("torch", "opacus", "backpack-for-pytorch")},
        "processor": platform.processor() or platform.machine(),
        "cells": [
            {
                **asdict(cell),
                "over_plain": {name: cell.ratio(name) for name in cell.seconds},
                "best_peer": cell.best_peer,
                "over_best_peer": cell.ratio(OURS, cell.best_peer),
            }
            for cell in cells
        ],
        "memory": [asdict(peak) for peak in peaks],
        "bar": bar,
    }
    _OUT.parent.mkdir(parents=True, exist_ok=True)
    _OUT.write_text(json.dumps(report, indent=1) + "\n")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cell_line(cell: Cell) -> str:
    return (
        f"{cell.model}, batch {cell.batch}, density {cell.density:g}: ours {cell.ratio(OURS):.2f} of plain SGD, "
        f"{cell.ratio(OURS, cell.best_peer):.2f} of {cell.best_peer}"
    )


def main() -> None:
    """Measure, print a table for each model as soon as it is done, and end with the BAR line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer cells and no memory: under three minutes")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # for every method alike, as in the processes that play sites
    warnings.simplefilter("ignore")  # Opacus and BackPACK warn about themselves all the time
    console = Console()
    cells: list[Cell] = []
    peaks: list[Peak] = []
    for name in options.models or (_QUICK_CELLS if options.quick else MODELS):
        model, model_cells, model_peaks = MODELS[name], [], []
        with console.status(name) as status:
            race = Race(model)
            for batch, density in _QUICK_CELLS.get(name, _CELLS[:1]) if options.quick else _CELLS:
                where = f"{name}, batch {batch}, density {density:g}"
                cell = race.run(batch, density, lambda doing, where=where: status.update(f"{where}: {doing}"))
                model_cells.append(cell)
                console.print(_cell_line(cell), highlight=False, soft_wrap=True)
            if not options.quick:
                model_peaks = _measure_memory(model_cells, status)
        console.print(_table(model, model_cells, model_peaks))
        console.print(_notes(model, model_cells), style="dim", highlight=False)
        cells += model_cells
        peaks += model_peaks
        _save(cells, peaks, _bar(cells))
    console.print(f"written to {_OUT}", highlight=False)
    print("BAR", *(f"{name}={value:.3g}" for name, value in _bar(cells).items()))


if __name__ == "__main__":
    try:
        main()
    except FedsieveError as error:
        raise SystemExit(f"step benchmark: {error}") from None
