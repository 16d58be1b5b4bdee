"""What every page is made of: cards, tables and figures, and the document around them.

A page is one HTML file without external requests: its own content security policy forbids them, and forbids every
script but the one that it is made with. Texts are escaped here unless they are said to be HTML.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape

from simulations.report.charts import Chart
from simulations.report.style import PAGE_STYLE
from simulations.report.svg import colour_class, legend_list


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, word_columns: int, colours: Sequence[int] = ()) -> str:
    """Return a table whose first ``word_columns`` columns hold words and the others figures; all cells are escaped.

    ``colours`` are those of the rows in the charts.
    """

    def cells(tag: str, texts: Sequence[str]) -> str:
        kinds = [""] * word_columns + [' class="number"'] * (len(texts) - word_columns)
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(f"<{tag}{scope}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    swatches = [f' class="swatch {colour_class(colour)}"' for colour in colours] or [""] * len(rows)
    body = "".join(f"<tr{swatch}>{cells('td', row)}</tr>" for swatch, row in zip(swatches, rows, strict=True))
    whole = f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    return scrolling(whole, f"Table of {', '.join(text for text in head if text)}")


def scrolling(content: str, name: str) -> str:
    """Return HTML that may be wider than the screen, in a box that a keyboard can scroll; ``name`` is for ears."""
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(name)}">{content}</div>'


def definitions(items: Sequence[tuple[str, str]]) -> str:
    """Return a list of terms and what is to be said about each; all texts are escaped."""
    return "<dl>" + "".join(f"<dt>{escape(term)}</dt><dd>{unbroken(text)}</dd>" for term, text in items) + "</dl>"


def figure(chart: Chart, badge: str = "") -> str:
    """Return a chart with its title above and the key to its colours below; ``badge`` is HTML."""
    marked = "abandoned round" if 'class="mark"' in chart.drawing else ""
    caption = f"<figcaption><h2>{escape(chart.title)}{badge}</h2><p>{escape(chart.note)}</p></figcaption>"
    return f"<figure>{caption}{chart.drawing}{legend_list(chart.legend, marked)}</figure>"


def section(title: str, body: str) -> str:
    """Return a card; ``body`` is HTML."""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'


def paragraph(text: str) -> str:
    """Return text as a paragraph, escaped."""
    return f"<p>{unbroken(text)}</p>"


def details(title: str, body: str) -> str:
    """Return a card that is folded until somebody opens it; ``body`` is HTML."""
    return f'<details class="card"><summary>{escape(title)}</summary>{body}</details>'


def unbroken(text: str) -> str:
    """Escape, and keep browsers from breaking 1e-05 after its minus sign."""
    return re.sub(r"\d+e-\d+", r'<span class="unbroken">\g<0></span>', escape(text))


def document(
    kind: str,
    name: str,
    headline: str,
    body: str,
    footer: str,
    *,
    warning: str = "",
    badges: str = "",
    above: str = "",
    script: str = "",
) -> str:
    """Return the whole page; ``body``, ``badges`` and ``above`` are HTML, the other texts are escaped here.

    ``script`` is the only code that the browser will run, and then the page may ask its own server, and nobody else.
    """
    title = f"{name} ({warning})" if warning else name
    code = f"<script>{script}</script>" if script else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
        f"<title>{escape(title)} - Fedsieve</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{PAGE_STYLE}</style></head><body>{above}<main>'
        f'<header><p class="kind">Fedsieve {escape(kind.lower())}{badges}</p>'
        f"<h1><bdi>{escape(name)}</bdi></h1>"
        f'<p class="headline">{unbroken(headline)}.</p></header>\n{body}\n'
        f"<footer><p>{escape(footer)}</p></footer></main>{code}</body></html>\n"
    )


def _policy(script: str) -> str:
    rules = [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        rules += [f"script-src 'sha256-{digest}'", "connect-src 'self'"]
    return "; ".join(rules)
