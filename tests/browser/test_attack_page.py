"""The page of a real attack in a real browser."""

from pathlib import Path

import pytest

from simulations import cli
from tests.browser.conftest import Browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A glance of the linear attack: two pictures, six densities, two levels of noise."""
    out = tmp_path_factory.mktemp("attack")
    assert cli.main(["attack", "linear", "--quick", "--in-process", "--out", str(out)]) == 0
    return out / "quick" / "linear" / "linear.html"


def test_its_pictures_and_points_are_shown_and_nobody_is_asked(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    drawn = "return [...document.images].filter(one => one.complete && one.naturalWidth === 28).length"
    assert browser.run(drawn) == browser.count("img") == 2 * 7 * 2
    assert browser.count("svg.chart") == 4 and browser.count("circle.point") == 4 * 2 * 6
    assert browser.run("return [...document.images].every(one => one.alt)") is True
    asked = [address for address in browser.requests() if not address.startswith("data:")]
    assert asked == [page.as_uri()] and browser.complaints() == []


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1200, "light")])
def test_it_fits_the_screen(browser: Browser, page: Path, width: int, scheme: str) -> None:
    browser.emulate(width=width, height=844, scheme=scheme)
    browser.open(page.as_uri())
    assert browser.run("return document.documentElement.scrollWidth") <= width
