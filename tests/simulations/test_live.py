"""The live view over HTTP: right page, right time, and for this machine alone."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from common.errors import ConfigError, RunFolderError
from server.runlog import RunLog
from simulations.cli import main
from simulations.report import write_report
from simulations.report.live import live_server
from tests.live_pages import get, served, status_of
from tests.run_logs import end_event, finished_run, round_event, start_event, write_log


def test_the_live_page_is_the_report_plus_its_status_and_script(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    report = write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    with served(folder) as url:
        _, page, _ = get(url)
    assert status_of(page) == "The run has ended: 4 of 4 rounds."
    main_part = re.compile(r"<main>.*</main>", re.S)
    assert main_part.search(page)[0] == main_part.search(report)[0]  # type: ignore[index]
    assert page.count("<script>") == 1 and not re.search(r"https?://|//\w+\.", page)
    assert "script-src 'sha256-" in page and "unsafe-inline'; script" not in page


def test_the_page_follows_the_log_and_says_when_nothing_is_new(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", start_event(), [round_event(1)], None)
    with served(folder) as url:
        _, page, tag = get(url)
        assert status_of(page) == "Live: 1 of 4 rounds are done." and page.count('class="bar"') == 2
        assert get(url, If_None_Match=tag) == (304, "", tag)
        log = RunLog(folder / "run.jsonl")
        log.write("round", **round_event(2))
        code, page, newer = get(url, If_None_Match=tag)
        assert code == 200 and newer != tag
        assert status_of(page) == "Live: 2 of 4 rounds are done." and page.count('class="bar"') == 4
        log.write("end", **end_event(2))
        log.close()
        assert status_of(get(url)[1]) == "The run has ended: 2 of 4 rounds."


def test_a_run_that_does_not_exist_yet_is_awaited(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "later"
    with served(folder) as url:
        assert status_of(get(url)[1]) == f"Waiting: {folder} has no run yet."
        folder.mkdir(parents=True)
        (folder / "run.jsonl").touch()
        assert status_of(get(url)[1]).startswith("Waiting"), "made, but without its first line"
        write_log(folder, start_event(), [], None)
        page = get(url)[1]
        assert status_of(page) == "Live: 0 of 4 rounds are done." and "Nothing measured yet" in page


def test_a_damaged_log_is_told_and_comes_back(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    whole = (folder / "run.jsonl").read_bytes()
    with served(folder) as url:
        (folder / "run.jsonl").write_bytes(b"<script>1</script>\n" + whole)
        code, page, _ = get(url)
        assert code == 200 and status_of(page) == "The log cannot be read."
        assert "line 1: not JSON" in page and "77.4 %" not in page
        (folder / "run.jsonl").write_bytes(whole)
        assert status_of(get(url)[1]) == "The run has ended: 4 of 4 rounds."


def test_several_runs_are_compared_live(tmp_path: Path) -> None:
    one = finished_run(tmp_path / "one")
    two = write_log(tmp_path / "two", start_event(name="two"), [round_event(1)], None)
    with served(one, two) as url:
        page = get(url)[1]
    assert status_of(page) == "Live: 1 of 2 runs have ended." and "2 runs compared" in page

    write_log(tmp_path / "three", start_event(name="three"), [round_event(1)], end_event(1))
    with served(one, tmp_path / "three") as url:
        assert status_of(get(url)[1]) == "All 2 runs have ended."


def test_the_page_says_when_its_log_changed_and_is_for_no_frame_and_no_cache(tmp_path: Path) -> None:
    one, two = finished_run(tmp_path / "one"), finished_run(tmp_path / "two")
    os.utime(one / "run.jsonl", (1000, 1000))
    os.utime(two / "run.jsonl", (2000, 2000))
    with served(one, two) as url, urlopen(url) as answer:
        headers, page = dict(answer.headers), answer.read()
        with pytest.raises(HTTPError) as missing:
            urlopen(f"{url}missing")
    assert b'data-changed="2000"' in page and b'class="live ended"' in page
    assert re.fullmatch('"[0-9a-f]{32}"', headers["ETag"]) and headers["Content-Length"] == str(len(page))
    assert headers["Content-Type"] == "text/html; charset=utf-8" and headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert missing.value.headers["Content-Type"] == "text/plain; charset=utf-8" and "ETag" not in missing.value.headers
    missing.value.close()


def test_only_this_machine_and_only_this_page(tmp_path: Path) -> None:
    with served(finished_run(tmp_path / "run")) as url:
        port = url.rstrip("/").rpartition(":")[2]
        assert get(url, Host=f"localhost:{port}")[0] == 200
        code, text, _ = get(url, Host=f"evil.example:{port}")
        assert code == 403 and "77.4" not in text
        assert get(f"{url}run.jsonl")[0] == get(f"{url}../../etc/passwd")[0] == 404
        assert get(f"{url}favicon.ico")[0] == 204
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", int(port)), timeout=5):
            pytest.fail("it listens on other addresses too")


def test_bad_input_is_refused_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RunFolderError, match="file is a file: expected the folder of a run"):
        live_server([tmp_path / "file"], 0)
    with pytest.raises(ConfigError, match=r"expected a port from 0 .* to 65535, got 70000"):
        live_server([tmp_path], 70_000)
    for port in (-1, 65_536):
        with pytest.raises(ConfigError, match="expected a port"):
            live_server([tmp_path], port)
    with live_server([tmp_path], 0) as taken:
        assert main(["watch", str(tmp_path), "--port", str(taken.server_port)]) == 2
    with monkeypatch.context() as patched:
        patched.setattr("simulations.report.live.ThreadingHTTPServer", lambda address, handler: address)
        assert live_server([tmp_path], 65_535) == ("127.0.0.1", 65_535)
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{taken.server_port}" in error and "--port 0" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "simulations.cli", "watch", str(tmp_path / "later"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{tmp_path / 'later'} has no run yet: the page waits for it\n"
        line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert url is not None and line.endswith("(Ctrl-C ends)\n")
        assert get(url[0])[0] == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "stopped watching; the run itself goes on" in out
