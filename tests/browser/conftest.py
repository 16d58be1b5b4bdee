"""A real Chromium, driven by Selenium. Without either these tests are skipped: 'make test-browser' has both."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_SWITCHES = (
    "--headless=new",
    "--no-sandbox",  # as root in a container there is no other way; the pages are our own
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


class Browser:
    """Loads pages and remembers what went wrong in them."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a page; what was logged before it is forgotten."""
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a function body in JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def text(self, selector: str = "body") -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def emulate(self, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Become a screen of this size, in CSS pixels, that prefers this colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """Return what the console has got since the last call: errors, and what the page's policy has stopped."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return the addresses that the browser has asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="session")
def _driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium here: 'make test-browser' installs it")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for switch in (*_SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield session
    session.quit()


@pytest.fixture
def browser(_driver: Any) -> Browser:
    """A browser at its usual size, in light colours."""
    browser = Browser(_driver)
    browser.open("about:blank")
    browser.emulate()
    return browser


@pytest.fixture
def page_of(tmp_path: Path) -> Any:
    """Return a function that writes the report of run folders and returns its address."""
    from simulations.report import write_report

    return lambda *folders: write_report(folders, tmp_path / "report.html").as_uri()
