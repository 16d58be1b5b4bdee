"""Pages of reports as tests read them: elements, texts, charts and tables."""

import re
from html.parser import HTMLParser
from pathlib import Path

from simulations.report import write_report

_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Collects elements and text, and fails on the first tag that does not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))

    def text(self, tag: str | None = None) -> str:
        return " ".join(text for parent, text in self.texts if parent != "style" and tag in (None, parent))

    def count(self, tag: str, css_class: str | None = None) -> int:
        return len([1 for name, attrs in self.elements if name == tag and css_class in (None, attrs.get("class"))])


def report_page(tmp_path: Path, *folders: Path) -> Page:
    return Page(write_report(folders, tmp_path / "out" / "report.html").read_text(encoding="utf-8"))


def charts_of(tmp_path: Path, *folders: Path) -> dict[str, str]:
    """Return title -> figure, as text."""
    html = write_report(folders, tmp_path / "report.html").read_text(encoding="utf-8")
    figures = re.findall(r"<figure>.*?</figure>", html, re.S)
    return {re.search(r"<h2>([^<]*?) ?<", figure)[1]: figure for figure in figures}  # type: ignore[index]


def cells_of(tmp_path: Path, title: str, *folders: Path) -> list[str]:
    html = write_report(folders, tmp_path / "report.html").read_text(encoding="utf-8")
    section = re.search(rf"<h2>{title}</h2>(.*?)</section>", html, re.S)
    assert section is not None
    return re.findall(r"<td[^>]*>(.*?)</td>", section[1])


def answers_of(tmp_path: Path, folder: Path) -> dict[str, str]:
    html = write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    section = re.search(r"<h2>In plain words</h2>(.*?)</section>", html, re.S)
    assert section is not None
    pairs = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", section[1], re.S)
    return {term: re.sub(r"<[^>]+>", "", text) for term, text in pairs}
