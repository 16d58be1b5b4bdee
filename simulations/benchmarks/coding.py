"""What our coding of an update costs in bits and in time, against raw numbers, zstd and Roaring bitmaps.

``python -m simulations.benchmarks.coding``

Values are Gaussian noise of deviation s plus a heavy-tailed signal of half its scale, as a private update is. Ours are
whole messages as a site sends them, with header and checksum, and from floats to floats, as int8 is scaled there and
back; the peers are bare. Indices are a uniformly random subset. Entropy is the limit: of the values rounded to
multiples of ``grid`` s, as they are distributed, and of the subset.
zstd runs at its default level, 3. All codings of a cell take turns in one process and one thread; times are CPU times,
medians over the turns.
"""

import json
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from common import coding
from common.coding import SparseUpdate, from_grid, to_grid
from common.errors import FedsieveError
from common.indices import decode_indices, encode_indices, index_entropy_bits
from common.mask import Indices, kept_count

try:
    import pyroaring
    import zstandard
except ImportError as error:
    raise SystemExit(f"coding benchmark: {error} ('make bench-coding' installs what it needs)") from None

_OUT = Path("runs/benchmarks/coding.json")
_SIZES = (26_010, 550_000, 11_000_000)  # the first is dp-cnn-s
_VALUE_DENSITY = 0.3
_GRIDS = (0.5, 1.0)
_INDEX_DENSITIES = (0.001, 0.01, 0.1, 0.3)
_BAR_DENSITY = 0.1  # the last line speaks of indices up to this density
_DEVIATION = 0.02
_LEAST_TURNS, _MOST_TURNS, _CELL_SECONDS = 9, 60, 3.0

Floats = NDArray[np.float32]
Seconds = dict[str, list[float]]  # of every turn, by coding
Coding = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured at one size and density: bits a kept coordinate, and how long the turns took."""

    part: str
    size: int
    density: float
    kept: int
    entropy: dict[str, float]  # of what each of our codings is given, in bits a kept coordinate
    bits: dict[str, float]
    encode: Seconds
    decode: Seconds

    def speed(self, name: str, *directions: Seconds) -> float:
        """Return the millions of kept coordinates a second of CPU time, there or back or both."""
        return self.kept / 1e6 / sum(statistics.median(seconds[name]) for seconds in directions)

    @property
    def over_entropy(self) -> float:
        """The length of our coding over the entropy, at worst."""
        return max(self.bits[name] / limit for name, limit in self.entropy.items())


def _zstd(bare: Coding) -> Coding:
    encode, decode = bare
    press, unpress = zstandard.ZstdCompressor(), zstandard.ZstdDecompressor()
    return (lambda data: press.compress(encode(data))), (lambda data: decode(unpress.decompress(data)))


def _floats(dtype: str) -> Coding:
    return (lambda values: values.astype(dtype).tobytes()), (lambda data: np.frombuffer(data, dtype).astype(np.float32))


def _int8() -> Coding:
    def encode(values: Floats) -> bytes:
        scale = np.abs(values).max() / np.float32(127)
        return scale.tobytes() + np.rint(values / scale).astype(np.int8).tobytes()

    return encode, (lambda data: np.frombuffer(data, np.int8, offset=4) * np.frombuffer(data, np.float32, 1))


def _ours(grid: float, size: int) -> Coding:
    step = grid * _DEVIATION

    def encode(values: Floats) -> bytes:
        return coding.encode(SparseUpdate(1, 0, 0, size, values), "calibrated", grid_step=step)

    def decode(data: bytes) -> Floats:
        return coding.decode(data, size=size, max_kept=size, value_coding="calibrated", grid_step=step).values

    return encode, decode


def _bitmap(size: int) -> Coding:
    def encode(indices: Indices) -> bytes:
        bits = np.zeros(size, np.bool_)
        bits[indices] = True
        return np.packbits(bits).tobytes()

    def decode(data: bytes) -> Indices:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=size)
        return np.flatnonzero(bits.view(np.bool_))  # several times faster than of integers

    return encode, decode


def _roaring() -> Coding:
    def encode(indices: Indices) -> bytes:
        return pyroaring.BitMap(array("I", indices.astype(np.uint32).tobytes())).serialize()

    return encode, (lambda data: np.asarray(pyroaring.BitMap.deserialize(data).to_array(), np.int64))


def _value_cell(size: int) -> Cell:
    kept = kept_count(size, _VALUE_DENSITY)
    rng = np.random.default_rng(size)
    values = (_DEVIATION * (rng.standard_normal(kept) + 0.5 * rng.laplace(size=kept))).astype(np.float32)
    codings = {"raw f32": _floats("<f4"), "f32, zstd": _zstd(_floats("<f4"))}
    codings |= {"raw f16": _floats("<f2"), "f16, zstd": _zstd(_floats("<f2")), "int8, zstd": _zstd(_int8())}
    entropy = {}
    for grid in _GRIDS:
        name = f"ours, grid {grid:g}"
        codings[name] = encode, decode = _ours(grid, size)
        step = grid * _DEVIATION
        integers = to_grid(values, step)
        entropy[name] = _entropy(integers)
        if not np.array_equal(decode(encode(values)), from_grid(integers, step)):
            raise FedsieveError(f"{kept} values of {name} came back as others")
    return Cell("values", size, _VALUE_DENSITY, kept, entropy, *_take_turns(codings, values))


def _index_cell(size: int, density: float) -> Cell:
    kept = kept_count(size, density)
    indices = np.sort(np.random.default_rng(size).choice(size, kept, replace=False))
    raw: Coding = (lambda a: a.astype("<u4").tobytes()), (lambda data: np.frombuffer(data, "<u4").astype(np.int64))
    gaps: Coding = (lambda a: raw[0](np.diff(a, prepend=0))), (lambda data: np.cumsum(raw[1](data)))
    codings: dict[str, Coding] = {"raw uint32": raw, "gaps, zstd": _zstd(gaps), "bitmap": _bitmap(size)}
    codings["Roaring"] = _roaring()
    codings["ours"] = (lambda a: encode_indices(a, size)), (lambda data: decode_indices(data, size, kept))
    for name, (encode, decode) in codings.items():
        if not np.array_equal(decode(encode(indices)), indices):
            raise FedsieveError(f"{kept} indices below {size} came back as others from {name}")
    entropy = {"ours": index_entropy_bits(size, kept) / kept}
    return Cell("indices", size, density, kept, entropy, *_take_turns(codings, indices))


def _entropy(integers: NDArray[np.int32]) -> float:
    """Return the zeroth-order entropy in bits, of the integers as they are distributed."""
    shares = np.unique(integers, return_counts=True)[1] / integers.size
    return float(-(shares * np.log2(shares)).sum())


def _take_turns(codings: dict[str, Coding], data: NDArray[Any]) -> tuple[dict[str, float], Seconds, Seconds]:
    """Return bits a coordinate, then the seconds of encoding and of decoding in turns whose order changes."""
    order = random.Random(1)
    bits = dict.fromkeys(codings, 0.0)
    encode: Seconds = {name: [] for name in codings}
    decode: Seconds = {name: [] for name in codings}
    start, turn = time.process_time(), 0
    while turn < _LEAST_TURNS or (turn < _MOST_TURNS and time.process_time() - start < _CELL_SECONDS):
        for name in order.sample(list(codings), len(codings)):
            before = time.process_time()
            coded = codings[name][0](data)
            between = time.process_time()
            codings[name][1](coded)
            decode[name].append(time.process_time() - between)
            encode[name].append(between - before)
            bits[name] = 8 * len(coded) / data.size
        turn += 1
    return bits, encode, decode


def _table(title: str, cells: dict[str, Cell]) -> Table:
    """Return a table with a row for each coding, and for each cell its bits and its speeds, there and back."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("coding", no_wrap=True)
    for heading in cells:
        table.add_column(f"{heading}\nbits", justify="right", no_wrap=True)
        table.add_column("\nM/s", justify="right", no_wrap=True)
    ours = next(iter(cells.values())).entropy
    for name in next(iter(cells.values())).bits:
        entries = []
        for cell in cells.values():
            speeds = cell.speed(name, cell.encode), cell.speed(name, cell.decode)
            entries += [f"{cell.bits[name]:.2f}", "/".join(f"{x:.0f}" if x >= 10 else f"{x:.1f}" for x in speeds)]
        table.add_row(name, *entries, style="bold" if name in ours else "")
    for name in ours:
        entries = [entry for cell in cells.values() for entry in (f"{cell.entropy[name]:.2f}", "")]
        table.add_row(name.replace("ours", "entropy"), *entries, style="green")
    return table


def _bar(cells: list[Cell]) -> dict[str, float]:
    values = [cell for cell in cells if cell.part == "values"]
    speeds = [cell.speed(name, cell.encode, cell.decode) for cell in values for name in cell.entropy]
    sparse = [cell for cell in cells if cell.part == "indices" and cell.density <= _BAR_DENSITY]
    return {
        "over_entropy": max(cell.over_entropy for cell in values),
        "mcoords_per_s": min(speeds),
        "index_over_entropy": max(cell.over_entropy for cell in sparse),
    }


def main() -> None:
    """Measure, print the tables, and end with the BAR line."""
    console = Console()
    with console.status("coding"):
        values = {f"d = {size:,}": _value_cell(size) for size in _SIZES}
        about = "bits of one, millions encoded / decoded a second"
        console.print(_table(f"values at density {_VALUE_DENSITY}: {about}", values))
        cells = list(values.values())
        for size in _SIZES:
            indices = {f"{density}": _index_cell(size, density) for density in _INDEX_DENSITIES}
            console.print(_table(f"indices at d = {size:,}, by density: {about}", indices))
            cells += indices.values()
    bar = _bar(cells)
    report = {
        "versions": {name: metadata.version(name) for name in ("numpy", "constriction", "pyroaring", "zstandard")},
        "processor": platform.processor() or platform.machine(),
        "cells": [{**asdict(cell), "over_entropy": cell.over_entropy} for cell in cells],
        "bar": bar,
    }
    _OUT.parent.mkdir(parents=True, exist_ok=True)
    _OUT.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written to {_OUT}", highlight=False)
    print("BAR", *(f"{name}={value:.4g}" for name, value in bar.items()))


if __name__ == "__main__":
    try:
        main()
    except FedsieveError as error:
        raise SystemExit(f"coding benchmark: {error}") from None
