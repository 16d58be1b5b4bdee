"""The live page in a real browser: it follows a run, and leaves the reader where the reader is."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from server.runlog import RunLog
from tests.browser.conftest import Browser
from tests.live_pages import served
from tests.run_logs import end_event, finished_run, round_event, start_event, write_log

_PATIENCE = 60.0  # seconds; only to end a test that has failed


def _until(told: Callable[[], str], wanted: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while wanted not in (text := told()):
        assert time.monotonic() < deadline, f"waited for {wanted!r}, got {text!r}"
        time.sleep(0.05)


def _bar(browser: Browser) -> Callable[[], str]:
    return lambda: browser.text("#live")


def test_the_page_updates_in_place(browser: Browser, tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", start_event(), [round_event(1), round_event(2)], None)
    with served(folder) as url:
        browser.open(url)
        _until(_bar(browser), "Last news")
        assert browser.text("#live [role=status]") == "Live: 2 of 4 rounds are done."
        browser.run(
            """
            window.loaded_once = true;
            document.querySelectorAll("details")[1].open = true;
            document.querySelectorAll("details")[1].querySelector(".scroll").focus({preventScroll: true});
            [...document.querySelectorAll("section")].find(one => one.textContent.startsWith("Rejections")).kept = true;
            window.scrollTo(0, 700);
            """
        )
        assert browser.count("circle.point") == 4 * 2 and browser.count("g.bar") == 2 * 2
        log = RunLog(folder / "run.jsonl")
        log.write("round", **round_event(3))
        _until(_bar(browser), "Live: 3 of 4 rounds are done.")
        assert browser.count("circle.point") == 4 * 3 and browser.count("g.bar") == 2 * 3
        assert "53.0 %" in browser.text(".tile")
        assert browser.run("return [window.loaded_once, window.scrollY]") == [True, 700], "never loaded anew"
        opened = "return [...document.querySelectorAll('details[open]>summary')].map(one => one.textContent)"
        assert browser.run(opened) == ["Full configuration"]
        focused = "return document.activeElement.closest('details').querySelector('summary').textContent"
        assert browser.run(focused) == "Full configuration"
        kept = "return [...document.querySelectorAll('section')].filter(one => one.kept).length"
        assert browser.run(kept) == 1, "what is the same is left alone"
        log.write("round", **round_event(4))
        log.write("end", **end_event(4))
        log.close()
        _until(_bar(browser), "The run has ended: 4 of 4 rounds.")
        assert browser.count("circle.point") == 4 * 4
        assert "Last news" not in browser.text("#live") and "unfinished" not in browser.text("header")
        assert set(browser.requests()) <= {url, f"{url}favicon.ico"}
        assert browser.complaints() == []


def test_it_waits_for_a_run_and_tells_a_damaged_log(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with served(folder) as url:
        browser.open(url)
        _until(_bar(browser), "has no run yet")
        assert browser.text("h1") == "No run yet"
        finished_run(folder)
        _until(_bar(browser), "The run has ended")
        assert browser.text("h1") == "cooling" and browser.count("circle.point") == 16
        log = folder / "run.jsonl"
        whole = log.read_bytes()
        log.write_bytes(b"<img src=x onerror=window.pwned=1>\n" + whole)
        _until(_bar(browser), "The log cannot be read.")
        assert "line 1: not JSON" in browser.text(".warning") and browser.run("return window.pwned") is None
        log.write_bytes(whole)
        _until(_bar(browser), "The run has ended")
        assert browser.complaints() == []


def test_a_comparison_grows_with_its_runs(browser: Browser, tmp_path: Path) -> None:
    ended = finished_run(tmp_path / "ended", 4)
    under_way = write_log(tmp_path / "new", start_event(name="new"), [round_event(1)], None)
    with served(ended, under_way) as url:
        browser.open(url)
        _until(_bar(browser), "Live: 1 of 2 runs have ended.")
        assert browser.count("circle.point") == 6 * (4 + 1) and browser.text("h1") == "2 runs compared"
        log = RunLog(under_way / "run.jsonl")
        log.write("round", **round_event(2))
        _until(lambda: browser.text("section"), "unfinished, 2 of 4 rounds")
        assert browser.count("circle.point") == 6 * (4 + 2)
        log.write("end", **end_event(2))
        log.close()
        _until(_bar(browser), "All 2 runs have ended.")
        assert set(browser.requests()) <= {url, f"{url}favicon.ico"} and browser.complaints() == []


def test_a_page_without_its_server_says_so(browser: Browser, tmp_path: Path) -> None:
    with served(write_log(tmp_path / "run", start_event(), [round_event(1)], None)) as url:
        browser.open(url)
        _until(_bar(browser), "Live: 1 of 4 rounds are done.")
        assert "No answer" not in browser.text("#live")
    _until(_bar(browser), 'No answer from "fedsieve watch"')
    assert browser.count("circle.point") == 4, "the last state stays"


def test_a_page_of_a_run_that_has_ended_needs_no_server(browser: Browser, tmp_path: Path) -> None:
    with served(finished_run(tmp_path / "run")) as url:
        browser.open(url)
        _until(_bar(browser), "The run has ended")
    asked = browser.run("return performance.getEntriesByType('resource').length")
    _until(lambda: str(browser.run("return performance.getEntriesByType('resource').length") > asked + 1), "True")
    assert "No answer" not in browser.text("#live")


def test_it_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    browser.emulate(width=390, height=844, scheme="dark")
    with served(write_log(tmp_path / "run", start_event(), [round_event(1)], None)) as url:
        browser.open(url)
        _until(_bar(browser), "Last news")
        assert browser.run("return document.documentElement.scrollWidth") == 390
        browser.run("window.scrollTo(0, 1500)")
        assert browser.run("return document.getElementById('live').getBoundingClientRect().top") == 0, "stays in sight"


def test_a_real_simulation_is_followed_from_before_its_beginning_to_its_end(browser: Browser, tmp_path: Path) -> None:
    with served(tmp_path / "real") as url:
        browser.open(url)
        _until(_bar(browser), "has no run yet")
        command = [sys.executable, "-m", "simulations.cli", "simulate", "--in-process", "--name", "real"]
        command += ["--dataset", "tests.support:small_dataset", "--model", "mlp:12-8-3", "--sites", "3"]
        command += ["--rounds", "5", "--set", "sampling-rate=0.5", "--set", "steps-per-round=1", "--out", str(tmp_path)]
        simulation = subprocess.run(command, capture_output=True, text=True, check=False)
        assert simulation.returncode == 0, simulation.stderr
        _until(_bar(browser), "The run has ended: 5 of 5 rounds.")
        assert browser.count("circle.point") == 4 * 5 and browser.count("g.bar") == 2 * 5
        assert (
            "A simulation: 3 sites that declare 80 records each (240 in all) trained one model together"
            in browser.text("dl")
        )
        assert browser.complaints() == []
