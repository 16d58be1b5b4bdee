"""``fedsieve site``, ``ledger`` and ``audit``: options, what is printed, and how a daemon is started and stopped."""

import csv
import io
import json
import logging
import os
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from client.channel import Access
from client.ledger import Ledger
from common.accounting import epsilon_of
from simulations.audit import AuditResult
from simulations.audit_plan import AuditPlan, plan_for
from simulations.cli import main
from tests.support import SMALL_MODEL, small_dataset, small_plan

ADDRESS = ["--tls-ca", "a", "--tls-certificate", "b", "--tls-key", "c", "--token", "d"]
ACCESS = Access(address="h:1", ca=Path("a"), certificate=Path("b"), key=Path("c"), token=Path("d"))
POLICY = f'epsilon = 8\ndelta = 1e-5\nmodels = ["{SMALL_MODEL}"]\n'


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A ledger of two runs: two rounds that nobody signed, then one of a server's."""
    path = tmp_path / "site.ledger"
    Ledger.create(path).close()
    whole = Ledger(path)
    for number, run, server in ((1, "trial", ""), (2, "trial", ""), (3, "real", "ab" * 32)):
        plan = small_plan(10, run=run, round=number, sampling_rate=0.1, steps=5 * number)
        whole.charge(plan, plan.to_bytes(), server)
    whole.close()
    return path


def test_what_each_run_has_spent_is_shown(
    ledger: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    whole = Ledger(ledger)
    charges = [entry.charge for entry in whole.entries()]
    spent = [f"{epsilon_of(some, 1e-5, 'rdp'):.4f}" for some in (charges[:2], charges[2:], charges)]
    whole.close()
    assert main(["ledger", "show", str(ledger), "--delta", "1e-5"]) == 0
    out = capsys.readouterr().out
    title = f"{ledger}: epsilon at delta 1e-05 per record (add or remove one record) "
    assert "".join(out.split()).startswith("".join(title.split())) and not out.startswith(" ")  # a long path is wrapped
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert [row[:2] + row[3:] for row in rows] == [
        ["trial", "not signed", "2", "15", spent[0]],
        ["real", "ab" * 8, "1", "15", spent[1]],
    ]
    assert all(row[2].endswith(" UTC") for row in rows)
    first = next(line for line in out.splitlines() if "trial" in line)
    assert "│ trial " in first and first.endswith(f" {spent[0]} │") and "  2 │" in first and " 15 │" in first
    assert out.splitlines()[-1] == f"all runs together: epsilon {spent[2]}"
    for budget, left in ((8, 8 - float(spent[2])), (1e-3, 0)):
        (ledger.parent / "site.toml").write_text(POLICY.replace("8", f"{budget}"))
        assert main(["ledger", "show", str(ledger), "--policy", str(ledger.parent / "site.toml")]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"all runs together: epsilon {spent[2]} of {budget:g}, ")
        assert float(last.split()[-2]) == pytest.approx(left, abs=2e-4) and last.endswith(" left")


def test_every_entry_is_exported(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "export", str(ledger)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    whole = Ledger(ledger)
    entries = list(whole.entries())
    whole.close()
    for row, entry in zip(rows, entries, strict=True):
        head = {key: str(getattr(entry, key)) for key in ("number", "time", "server", "run", "round", "plan", "hash")}
        charge = {key: "" if value is None else str(value) for key, value in asdict(entry.charge).items()}
        assert row == head | charge


def test_what_a_daemon_does_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(
        training=False,
        round=3,
        run="trial",
        version="1.2",
        entries=4,
        epsilon_spent=0.5,
        epsilon_budget=8.0,
        delta=1e-5,
    )
    status.progress = SimpleNamespace(steps_done=2, steps=9)
    asked: list[Access] = []
    site = SimpleNamespace(status=lambda: status)
    monkeypatch.setattr("client.remote.RemoteSite", lambda access: asked.append(access) or site)
    for doing in ("idle", "training round 3 of trial, step 2 of 9"):
        status.training = doing != "idle"
        assert main(["site", "status", "--address", "h:1", *ADDRESS]) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"fedsieve 1.2: {doing}",
            "4 charges, epsilon 0.5000 of 8 at delta 1e-05 per record (add or remove one record)",
        ]
    assert main(["site", "status"]) == 0
    assert asked == [ACCESS, ACCESS, Access(address="127.0.0.1:9301")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("signed", [True, False])
def test_a_daemon_serves_until_it_is_told_to_stop(
    number: signal.Signals,
    signed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[Any] = []
    did: list[str] = []

    class Daemon:
        def __init__(self, *given: Any) -> None:
            made[:] = given

        def start(self) -> None:
            did.append("start")
            telling.start()

        def stop(self) -> None:
            did.append("stop")

    def tell() -> None:
        did.append("told")
        os.kill(os.getpid(), number)

    telling = threading.Timer(0.2, tell)
    monkeypatch.setattr("client.service.Daemon", Daemon)
    monkeypatch.setattr("client.memory.keep_freed_memory", lambda: did.append("memory"))
    monkeypatch.setattr(logging, "basicConfig", lambda **given: did.append(f"{given['level']} {given['force']}"))
    caplog.set_level(logging.INFO)
    whole = small_dataset()
    np.savez(tmp_path / "x.npz", **{name: getattr(whole, name) for name in type(whole).__dataclass_fields__})
    (tmp_path / "site.toml").write_text(POLICY + (f'server-key = "{"ab" * 32}"\n' if signed else ""))
    Ledger.create(tmp_path / "x.ledger").close()
    files = ["--data", str(tmp_path / "x.npz"), "--policy", str(tmp_path / "site.toml")]
    files += ["--ledger", str(tmp_path / "x.ledger"), "--declared-size", "200", "--device", "cpu"]
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert main(["site", "serve", *files, "--listen", "h:1", "--threads", "3", *ADDRESS]) == 0
        telling.join()
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert did == ["20 True", "memory", "start", "told", "stop"]
    site, guard, access, threads = made
    assert (access, threads) == (ACCESS, 3) and guard.policy.models == (SMALL_MODEL,)
    assert site.declared_size == 200
    open_to_all = [] if signed else ["the policy names no server-key: whoever reaches h:1 can spend the budget"]
    assert caplog.messages == ["serving 200 declared records at h:1", *open_to_all, "stopped"]


def test_a_model_that_does_not_fit_the_records_is_told_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger.create(tmp_path / "x.ledger").close()
    (tmp_path / "site.toml").write_text(POLICY.replace(SMALL_MODEL, "mlp:5-3"))
    files = ["--policy", str(tmp_path / "site.toml"), "--ledger", str(tmp_path / "x.ledger"), "--declared-size", "200"]
    assert main(["site", "serve", "--data", "tests.support:small_dataset", *files]) == 2
    assert "mlp:5-3" in capsys.readouterr().err


@pytest.mark.parametrize("right", [True, False])
def test_what_an_audit_found_is_printed_and_written(
    right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_for("record", 1.0, 1e-5, method="random", canaries=50)
    bound = 0.5 if right else 1.5
    found = AuditResult(claimed_epsilon=1.0, lower_bound=bound, delta=1e-5, canaries=50, guesses=20, right=15)
    planned: list[Any] = []
    audited: list[Any] = []

    def make_plan(*given: Any, **named: Any) -> AuditPlan:
        planned.append((given, named))
        return plan

    monkeypatch.setattr("simulations.audit_plan.plan_for", make_plan)
    monkeypatch.setattr("simulations.audit_plan.plan_of_run", make_plan)
    monkeypatch.setattr("simulations.audit.audit", lambda *given: audited.append(given) or found)
    monkeypatch.chdir(tmp_path)
    assert main(["audit"]) == int(not right)
    claim = "the claim stands" if right else "THE CLAIM IS WRONG: more leaks than epsilon allows"
    assert capsys.readouterr().out.splitlines() == [
        "claimed      epsilon 1.0000 at delta 1e-05 per record (add or remove one record)",
        f"lower bound  epsilon {bound:.4f} with 95 % confidence",
        "guesses      15 of 20 right, 50 canaries",
        claim,
        "written to audit.json",
        f"BAR claimed_epsilon=1.0000 lower_bound={bound:.4f} canaries=50",
    ]
    assert json.loads((tmp_path / "audit.json").read_text()) == {**asdict(found), "plan": asdict(plan)}
    (tmp_path / "run").mkdir()
    main(["audit", "--run-folder", "run", "--canaries", "7", "--seed", "3"])
    main(["audit", "--unit", "client", "--epsilon", "2", "--delta", "1e-6", "--method", "dense", "--to", "here.json"])
    assert (tmp_path / "run" / "audit.json").exists() and (tmp_path / "here.json").exists()
    assert planned == [
        (("record", 1.0, 1e-5), {"method": "random", "canaries": 5000}),
        ((Path("run"),), {}),
        (("client", 2.0, 1e-6), {"method": "dense", "canaries": 5000}),
    ]
    assert audited == [(plan, 5000, 1), (plan, 7, 3), (plan, 5000, 1)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["site"],
        ["ledger"],
        ["ledger", "create"],
        ["ledger", "verify", "x", "--delta", "1"],
        ["site", "serve", "--data", "x", "--policy", "x"],
        ["site", "serve", "--data", "x", "--ledger", "x"],
        ["site", "serve", "--policy", "x", "--ledger", "x"],
        ["audit", "--unit", "hospital"],
    ],
)
def test_what_is_missing_or_wrong_on_the_command_line_is_told(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: fedsieve" in capsys.readouterr().err
