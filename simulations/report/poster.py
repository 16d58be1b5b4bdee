"""Charts as one SVG file that needs no page around it, such as a README shows."""

import textwrap
from collections.abc import Sequence
from html import escape

from simulations.report.charts import Chart
from simulations.report.style import DRAWING_STYLE
from simulations.report.svg import HEIGHT, WIDTH, colour_class

_MARGIN, _PANEL_HEAD, _KEY_ROW, _KEY_COLUMNS, _SWATCH = 20.0, 28.0, 22.0, 3, 16.0
_TITLE_ROW, _NOTE_ROW = 25.0, 18.0
_TITLE_CHARACTER, _NOTE_CHARACTER = 11.2, 7.0  # pixels of a wide one, on average: a line must not leave the drawing
_STYLE = (
    DRAWING_STYLE
    + """
.card{fill:var(--card);stroke:var(--rule)}.key{fill:var(--c)}
.title{font-size:19px;font-weight:650;fill:var(--ink)}.panel{font-size:14px;font-weight:600;fill:var(--ink)}
.note{font-size:13px;fill:var(--muted)}
"""
)


def poster(title: str, note: str, charts: Sequence[Chart]) -> str:
    """Return the charts side by side with one key to all of them; the words are escaped here.

    The drawing brings its own ground: the page that shows it may be light where the reader's system is dark.
    """
    width = len(charts) * WIDTH + (len(charts) + 1) * _MARGIN
    titles, notes = (
        textwrap.wrap(text, int((width - 2 * _MARGIN) / character))
        for text, character in ((title, _TITLE_CHARACTER), (note, _NOTE_CHARACTER))
    )
    notes_top = 12 + _TITLE_ROW * len(titles)
    head = notes_top + _NOTE_ROW * len(notes) + 7
    keys = list({(one.label, one.colour): one for chart in charts for one in chart.legend}.values())
    key_top = head + _PANEL_HEAD + HEIGHT + 30
    widest = _SWATCH + _NOTE_CHARACTER * max((len(one.label) for one in keys), default=0)
    columns = max(1, min(_KEY_COLUMNS, int((width - _MARGIN) / (widest + _MARGIN / 2))))
    height = key_top + -(-len(keys) // columns) * _KEY_ROW
    parts = [
        f'<rect class="card" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="14"/>',
    ]
    for css, lines, top, row in (("title", titles, 9.0, _TITLE_ROW), ("note", notes, notes_top + 1, _NOTE_ROW)):
        for number, line in enumerate(lines, start=1):
            parts.append(f'<text class="{css}" x="{_MARGIN:g}" y="{top + number * row:g}">{escape(line)}</text>')
    for number, chart in enumerate(charts):
        left = _MARGIN + number * (WIDTH + _MARGIN)
        parts.append(f'<text class="panel" x="{left:g}" y="{head + 20:g}">{escape(chart.title)}</text>')
        parts.append(f'<g transform="translate({left:g} {head + _PANEL_HEAD:g})">{chart.drawing}</g>')
    for number, series in enumerate(keys):
        row, column = divmod(number, columns)
        x, y = _MARGIN + column * (width - _MARGIN) / columns, key_top + row * _KEY_ROW
        key = f'<rect class="key" x="{x:.1f}" y="{y - 10:.1f}" width="10" height="10" rx="3"/>'
        text = f'<text class="note" x="{x + _SWATCH:.1f}" y="{y:.1f}">{escape(series.label)}</text>'
        parts.append(f'<g class="{colour_class(series.colour)}">{key}{text}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}"><title>{escape(title)}</title><desc>{escape(note)}</desc>'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )
