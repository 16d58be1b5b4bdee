"""The report in a real browser: it loads, it shows everything, it fits, and it asks nobody for anything."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Browser
from tests.run_logs import end_event, finished_run, public_run, round_event, start_event, write_log

PageOf = Callable[..., str]
_LONG = "a-name-that-nobody-would-choose-but-somebody-will" * 3
_EVIL = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"

_POINTS = """
return Object.fromEntries([...document.querySelectorAll("figure")].map(figure => [
  figure.querySelector("h2").childNodes[0].textContent.trim(),
  [...figure.querySelectorAll("circle.point, g.bar")].filter(mark => mark.getBoundingClientRect().width > 0).length]))
"""
# WCAG 2 contrast of every text on the page against the nearest background behind it: the lowest, and where.
_CONTRAST = """
const parse = colour => colour.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const ground = element => {
  for (; element; element = element.parentElement) {
    const colour = parse(getComputedStyle(element).backgroundColor);
    if (colour.length < 4 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let worst = [99, ""];
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || element.closest("title,script,style")) continue;
  const style = getComputedStyle(element);
  const [a, b] = [light(parse(element.closest("svg") ? style.fill : style.color)), light(ground(element))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < worst[0]) worst = [contrast, walker.currentNode.textContent];
}
return worst;
"""


def _busy_run(folder: Path) -> Path:
    """Long names, long reasons, a rejection, an abandoned round, and text that would like to be code."""
    rejections = [{"site": "a", "reason": f"{_LONG} {_EVIL}"}]
    rounds = [round_event(1), round_event(2, rejections=rejections, abandoned=True, admitted=0), round_event(3)]
    end = end_event(3)
    end["sites"][0] |= {"site": _LONG, "dropped": _EVIL}
    start = start_event(name=_LONG, config={"dataset": _LONG, "model": _EVIL, "delta": 1e-5})
    return write_log(folder, start, rounds, end)


@pytest.mark.parametrize("rounds", [1, 20, 70])
def test_every_chart_shows_a_point_for_every_round(
    browser: Browser, page_of: PageOf, tmp_path: Path, rounds: int
) -> None:
    browser.open(page_of(finished_run(tmp_path / "run", rounds)))
    points = browser.run(_POINTS)
    assert len(points) == 6 and set(points.values()) == {rounds}, points


def test_a_comparison_shows_the_points_of_all_runs(browser: Browser, page_of: PageOf, tmp_path: Path) -> None:
    browser.open(page_of(finished_run(tmp_path / "one", 5), public_run(tmp_path / "two")))
    points = browser.run(_POINTS)
    assert points.pop("Epsilon spent") == 5, "the other run is not private"
    assert len(points) == 5 and set(points.values()) == {5 + 4}, points


def test_pages_ask_nobody_and_log_nothing(browser: Browser, page_of: PageOf, tmp_path: Path) -> None:
    busy = _busy_run(tmp_path / "busy")
    for folders in ([busy], [busy, public_run(tmp_path / "open")]):
        address = page_of(*folders)
        browser.open(address)
        assert browser.text("h1")
        assert browser.requests() == [address]
        assert browser.complaints() == []
        assert browser.run("return window.pwned") is None and browser.count("img, script") == 0


def test_the_policy_of_the_page_stops_code_and_requests(browser: Browser, page_of: PageOf, tmp_path: Path) -> None:
    """The near miss: were text to become markup after all, the browser would still refuse to obey it."""
    address = page_of(finished_run(tmp_path / "run"))
    page = tmp_path / "report.html"
    page.write_text(page.read_text().replace("</main>", f'{_EVIL}<img src="http://127.0.0.1:9/x"></main>'))
    browser.open(address)
    assert browser.count("img") == 2 and browser.run("return window.pwned") is None
    assert sum("Content Security Policy" in complaint for complaint in browser.complaints()) >= 2


@pytest.mark.parametrize("width", [320, 390, 768, 1200])
def test_nothing_sticks_out_sideways(browser: Browser, page_of: PageOf, tmp_path: Path, width: int) -> None:
    busy = _busy_run(tmp_path / "busy")
    browser.emulate(width=width, height=844)
    for folders in ([busy], [busy, public_run(tmp_path / f"open-{width}")]):
        browser.open(page_of(*folders))
        browser.run("document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert browser.run("return innerWidth") == width
        shown, needed = browser.run(
            "const page = document.documentElement; return [page.clientWidth, page.scrollWidth]"
        )
        assert needed == shown


def test_text_on_a_phone_can_be_read(browser: Browser, page_of: PageOf, tmp_path: Path) -> None:
    browser.emulate(width=390, height=844)
    browser.open(page_of(finished_run(tmp_path / "run")))
    smallest = browser.run(
        "return Math.min(...[...document.querySelectorAll('p,dd,dt,td,th,li,h2')].filter(one => one.offsetHeight)"
        ".map(one => parseFloat(getComputedStyle(one).fontSize)))"
    )
    assert smallest >= 13
    scale = "const chart = document.querySelector('svg.chart'); return chart.getBoundingClientRect().width / 460"
    label = "return parseFloat(getComputedStyle(document.querySelector('svg.chart text')).fontSize)"
    assert browser.run(scale) * browser.run(label) >= 9.5, "labels of a chart shrink with it"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_reader_and_can_be_told_apart(
    browser: Browser, page_of: PageOf, tmp_path: Path, scheme: str
) -> None:
    browser.emulate(scheme=scheme)
    for folders in ([_busy_run(tmp_path / "busy")], [public_run(tmp_path / "open"), finished_run(tmp_path / "run")]):
        browser.open(page_of(*folders))
        ground = browser.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert all(part > 200 for part in ground) if scheme == "light" else all(part < 50 for part in ground)
        contrast, where = browser.run(_CONTRAST)
        assert contrast >= 4.5, f"{where!r} has a contrast of {contrast:.2f}"


def test_charts_have_words_and_tables_take_the_keyboard(browser: Browser, page_of: PageOf, tmp_path: Path) -> None:
    browser.open(page_of(finished_run(tmp_path / "run")))
    labels = browser.run("return [...document.querySelectorAll('svg[role=img]')].map(one => one.ariaLabel)")
    assert len(labels) == 6 and all("first" in label and "last" in label for label in labels)
    assert browser.run("return [...document.querySelectorAll('.scroll')].every(one => one.tabIndex === 0)") is True
    assert browser.run("return document.documentElement.lang") == "en" and browser.count("h1") == 1
