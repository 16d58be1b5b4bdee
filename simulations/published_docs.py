"""Tables of published results in the documentation: the commands that publish write them, so that they cannot differ.

A page asks for one with ``<!-- published: NAME -->`` and ``<!-- end of published -->`` on lines of their own; what
stands between them is replaced.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
DOCS = _ROOT / "docs"
_BLOCK = re.compile(r"^(<!-- published: (\S+) -->\n).*?(?=^<!-- end of published -->)", re.M | re.S)


def pages() -> list[Path]:
    """Return the pages of the documentation."""
    return [_ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def filled(text: str, tables: Mapping[str, str]) -> str:
    """Return a page with the tables that it asks for; those of other names stay as they are."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{tables[match[2]].strip()}\n\n" if match[2] in tables else match[0]

    return _BLOCK.sub(fill, text)


def write(tables: Mapping[str, str]) -> list[Path]:
    """Write tables into the pages that ask for them; returns the pages that changed."""
    changed = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text, tables)) != text:
            page.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown: the first column has words, the others figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
