"""The page of an attack: how well it does against density and noise, with the pictures that it found."""

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulations.attacks.inversion import PICTURES, Inversion
from simulations.experiments.definition import Case, Experiment
from simulations.experiments.drawing import measured_point
from simulations.experiments.metrics import METRICS
from simulations.experiments.results import Results, estimate
from simulations.experiments.runner import Task
from simulations.report.charts import Chart
from simulations.report.page import document, figure, paragraph, scrolling, section, table
from simulations.report.svg import Axis, Series, in_words, line_chart

_MOST_PICTURES = 8
_MEASURES = (
    "What the attacker finds is compared with what the site holds. MSE and squared error: how far a pixel from 0 to 1 "
    "is off, squared, so more is safer. PSNR and SSIM: likeness, so less is safer; an SSIM of 1 is the same picture, "
    "and near 0 nothing is recognised. Bound: the least mean error of this attack over pixels that it can solve."
)
_PIXEL_STYLE = "width:64px;height:64px;image-rendering:pixelated;margin:1px"


def write_page(experiment: Experiment, results: Results, out: Path, destination: Path) -> None:
    """Write the page of an experiment whose cases are attacks; it needs the pictures that they left in ``out``."""
    seeds = len({seed for case in experiment.cases for seed in results.of(experiment, case)})
    body = section("In plain words", paragraph(f"{_MEASURES} {experiment.notes}"))
    body += f'<div class="charts">{"".join(_charts(experiment, results, seeds))}</div>'
    body += section("Figures", _table(experiment, results))
    for level, cases in _by_level(experiment).items():
        body += section(f"Pictures: {level}", _sheet(experiment, results, cases, out))
    footer = f"{experiment.source}. Means over the seeds that were measured; pictures of seed {experiment.seeds[0]}."
    headline = "What an attacker makes of the releases of sites of one record each, asked for one step by a real plan"
    destination.parent.mkdir(parents=True, exist_ok=True)
    glance = f"a glance: {experiment.cases[0].settings['pictures']} pictures, {seeds} seed{'s' if seeds > 1 else ''}"
    badges = f' <span class="badge">{glance}</span>' if experiment.quick else ""
    page = document("Attack", experiment.title, headline, body, footer, badges=badges)
    destination.write_text(page, encoding="utf-8")


def _density(case: Case) -> float:
    return float(case.settings["density"])


def _by_level(experiment: Experiment) -> dict[str, list[Case]]:
    """Group the cases by the noise, each from dense to sparse."""
    groups: dict[str, list[Case]] = {}
    for case in experiment.cases:
        clip_norm = float(case.settings.get("clip-norm", 1.0))
        noise = float(case.settings.get("noise", 0.0)) or float(case.settings["noise-multiplier"]) * clip_norm
        words = f"noise of std {noise:g}" if noise else "neither clipping nor noise"
        if noise and "clip-norm" in case.settings:
            words += f", clip norm {clip_norm:g}"
        groups.setdefault(words, []).append(case)
    return {words: sorted(cases, key=_density, reverse=True) for words, cases in groups.items()}


def _charts(experiment: Experiment, results: Results, seeds: int) -> list[str]:
    drawn = []
    for name in experiment.metrics:
        metric = METRICS[name]
        series = [
            Series(
                level,
                sorted(
                    (measured_point(experiment, case, name, "density", results) for case in cases),
                    key=lambda one: one.x,
                ),
                colour,
            )
            for colour, (level, cases) in enumerate(_by_level(experiment).items(), start=1)
        ]
        words = " ".join(in_words(one, "{:.4g}".format) for one in series)
        axis = Axis("density: share of the coordinates that are released", lambda value: f"{value:g}")
        drawing = line_chart(
            f"{metric.heading} against density. {words}", series, axis, Axis(metric.heading, "{:g}".format)
        )
        drawn.append(
            figure(
                Chart(
                    metric.heading,
                    f"Mean over pictures and seeds{'; bars: its standard error' if seeds > 1 else ''}.",
                    drawing,
                    series,
                )
            )
        )
    return drawn


def _table(experiment: Experiment, results: Results) -> str:
    rows = []
    for level, cases in _by_level(experiment).items():
        for case in cases:
            cells = []
            for name in experiment.metrics:
                values = [one.figures[name] for one in results.of(experiment, case).values() if name in one.figures]
                found = estimate(values)
                cells.append("-" if found is None else METRICS[name].write(found.mean))
            rows.append([level, f"{_density(case):g}", *cells])
    head = ["protection", "density", *(METRICS[name].heading for name in experiment.metrics)]
    return table(head, rows, word_columns=1)


def _sheet(experiment: Experiment, results: Results, cases: Sequence[Case], out: Path) -> str:
    """Return rows of pictures: what the sites hold, then what was found at each density.

    Pictures of an attack with other settings than today's may still lie there: only those of a result count.
    """
    rows: list[tuple[str, NDArray[np.float32]]] = []
    for case in cases:
        seed = experiment.seeds[0]
        folder = Task(experiment, case, seed).folder(out)
        if results.find(experiment, case, seed) is not None and (folder / PICTURES).is_file():
            pictures = Inversion.load(folder)
            if not rows:
                rows.append(("what the sites hold", pictures.originals))
            rows.append((f"density {_density(case):g}", pictures.found))
    if not rows:
        return "<p>No pictures yet.</p>"
    lines = []
    for title, pictures_of_row in rows:
        images = "".join(
            f'<img alt="{escape(title)}, picture {number}" style="{_PIXEL_STYLE}" src="{data_uri(picture)}">'
            for number, picture in enumerate(pictures_of_row[:_MOST_PICTURES], start=1)
        )
        lines.append(f'<tr><td>{escape(title)}</td><td style="max-width:none;white-space:nowrap">{images}</td></tr>')
    return scrolling(f"<table><tbody>{''.join(lines)}</tbody></table>", "Pictures, a row for each density")


def data_uri(picture: NDArray[np.float32]) -> str:
    """Return a grey picture (height, width) in [0, 1] as a PNG that stands in the page itself."""
    grey = np.clip(np.rint(255 * picture), 0, 255).astype(np.uint8)
    height, width = grey.shape
    lines = b"".join(b"\0" + row.tobytes() for row in grey)  # 0: this line is not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines)) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
