import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from common.config import RunConfig
from simulations.cli import main
from simulations.crew import Workers
from simulations.run import Engine, config_with

QUICK = ["--in-process", "--dataset", "tests.support:small_dataset", "--model", "mlp:12-8-3"]
SMALLER = ["--set", "steps-per-round=2", "--set", "sampling-rate=0.5", "--sites", "4"]


def test_simulate_prints_a_summary_and_a_line_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *QUICK, *SMALLER, "--rounds", "3", "--out", str(tmp_path), "--name", "x"]) == 0
    out = capsys.readouterr().out
    last = out.strip().splitlines()[-1]
    assert re.fullmatch(r"BAR accuracy=[01]\.\d{4} epsilon=[78]\.\d{4} uplink_saving=\d+\.\d{3} seconds=\d+\.\d", last)
    assert "round 3/3: accuracy" in out and ", saving " in out and "than dense float32" in out
    files = {path.name for path in (tmp_path / "x").iterdir()}
    assert files == {"run.jsonl", "config.toml", "checkpoint.npz", "report.html"}


def test_not_private_is_said_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--no-dp", "--final-density", "1", "--rounds", "2", "--out", str(tmp_path), "--name", "x"]
    assert main(["simulate", *QUICK, *SMALLER, *options]) == 0
    out = capsys.readouterr().out
    assert out.count("not private") + out.count("NOT PRIVATE") >= 4
    assert "epsilon=none" in out
    assert "not private" in (tmp_path / "x" / "report.html").read_text().lower()


def test_reports_are_rebuilt_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, density in [("a", "1"), ("b", "0.2")]:
        options = ["--final-density", density, "--rounds", "2", "--out", str(tmp_path), "--name", name]
        assert main(["simulate", *QUICK, *SMALLER, *options]) == 0
    (tmp_path / "a" / "report.html").unlink()
    assert main(["report", str(tmp_path / "a")]) == 0
    assert (tmp_path / "a" / "report.html").exists()
    both = tmp_path / "both.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--to", str(both)]) == 0
    assert "final-density" in both.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--set", "final-densty=0.1"], "did you mean 'final-density'"),
        (["simulate", "--final-density", "1.5"], "final-density=1.5"),
        (["simulate", "--set", "grid=0.001"], "from 0.015625 to 1024, got grid=0.001"),
        (["simulate", "--set", "clip-norm=1e-9"], "from 1e-06 to 1000000000, got clip-norm=1e-09"),
        (["simulate", "--dataset", "nothing"], "fedsieve data get nothing"),
        (["simulate", "--dataset", "tests.support:small_dataset", "--model", "nothing"], "unknown model 'nothing'"),
        (["simulate", "--resume", "/nowhere/run"], "no run at /nowhere/run"),
        (["simulate", "--resume", "/nowhere/run", "--rounds", "3"], "keeps its config: leave out rounds"),
        (["report", "/nowhere/run"], "/nowhere/run"),
        (["data", "get", "imagenet"], "do not know how to get 'imagenet'"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "out"), "--in-process"] if "--resume" not in arguments else []
    assert main(arguments + (out if arguments[0] == "simulate" else [])) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_in_which_nothing_was_learnt_is_a_failure_without_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--model", "mlp:99-3", "--set", "evaluate-every=0", "--out", str(tmp_path), "--rounds", "2"]
    assert main(["simulate", *QUICK, *SMALLER, *wrong, "--name", "x"]) == 2
    told = capsys.readouterr()
    reason = "it fails on made-up records: mat1 and mat2 shapes cannot be multiplied"
    assert "nothing was learnt: none of 2 rounds had enough admitted replies" in told.err and reason in told.err
    assert "BAR" not in told.out
    assert main(["simulate", "--in-process", "--resume", str(tmp_path / "x")]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("records", "offered"), [(3, 10), (98, 100), (240, 250), (1437, 1500), (60_000, 60_000)])
def test_the_size_that_a_site_declares_is_its_operators_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: int, offered: int
) -> None:
    empty, targets = np.zeros((records, 2), np.float32), np.zeros(records, np.int64)
    np.savez(tmp_path / "x.npz", train_inputs=empty, train_targets=targets, test_inputs=empty, test_targets=targets)
    (tmp_path / "site.toml").write_text('epsilon = 8\ndelta = 1e-5\nmodels = ["mlp:2-2"]\n')
    serve = ["site", "serve", "--data", str(tmp_path / "x.npz"), "--policy", str(tmp_path / "site.toml")]
    for none in ([], ["--declared-size", "0"]):
        assert main([*serve, "--ledger", str(tmp_path / "no.ledger"), *none]) == 2
        assert f"such as --declared-size {offered}\n" in capsys.readouterr().err
    assert main([*serve, "--ledger", str(tmp_path / "no.ledger"), "--declared-size", "7"]) == 2
    assert "no.ledger" in capsys.readouterr().err


def test_what_a_site_says_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from simulations.progress import RunDisplay
    from simulations.run import config_with

    parts = {"index": 0, "values": 0, "header": 0, "framing": 1}
    figures = {
        "accuracy": None,
        "loss": None,
        "epsilon": 1.0,
        "bits_per_value": 3.1,
        "bits_per_parameter": 1.5,
        "dense_uplink": 4,
        "density": 0.3,
    }
    rejections = [{"site": 1, "reason": "cannot read [/data/x.npz]"}]
    event = {"event": "round", "round": 1, "rejections": rejections, "abandoned": False, "admitted": 0}
    with RunDisplay(config_with({})) as display:
        display.show({**event, **figures, "uplink": parts, "downlink": {**parts, "values": 99}})
    out = capsys.readouterr().out
    assert "cannot read [/data/x.npz]" in out
    assert "3.1 bits a value, 1.5 bits a parameter, density 0.3, down 100 B; noise alone 3.06 bits a value" in out


def test_options_of_the_engine_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engines, workers = [], []

    def simulated(config: object, engine: object, listeners: object) -> None:
        engines.append(engine)
        raise KeyboardInterrupt

    monkeypatch.setattr("simulations.run.simulate", simulated)
    asked = ["--actors", "3", "--gpus-per-actor", "0.5", "--ray-address", "a:1"]
    assert main(["simulate", "--out", str(tmp_path), *asked]) == 130
    assert engines == [Engine(actors=3, gpus_per_actor=0.5, ray_address="a:1")]
    assert main(["simulate", "--out", str(tmp_path), "--in-process"]) == 130
    assert engines[1:] == [Engine(in_process=True)]

    monkeypatch.setattr("simulations.experiments.runner.carry_out", lambda *given: workers.append(given[3]) or [])
    chosen = ["experiments", "run", "selection", "--quick", "--out", str(tmp_path)]
    assert main([*chosen, "--jobs", "3", "--ray-address", "a:1"]) == main([*chosen, "--in-process"]) == 0
    assert workers == [Workers(jobs=3, ray_address="a:1"), Workers(in_process=True)]
    assert main([*chosen, "--jobs", "-1"]) == 2


@pytest.mark.parametrize(
    ("arguments", "called", "options"),
    [
        (["report", "a", "b"], "_report", {"runs": [Path("a"), Path("b")], "to": None}),
        (["watch", "a"], "_watch", {"runs": [Path("a")], "port": 8420}),
        (["watch", "a", "b", "--port", "0"], "_watch", {"runs": [Path("a"), Path("b")], "port": 0}),
        (["data", "get", "mnist"], "_data_get", {"dataset": "mnist", "source": None}),
        (["methods"], "_methods", {}),
        (["methods", "show", "dense"], "_methods_show", {"name": "dense"}),
    ],
)
def test_what_a_command_is_called_with(
    arguments: list[str], called: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(f"simulations.cli.{called}", lambda parsed: given.append(vars(parsed)) or 3)
    assert main(arguments) == 3
    del given[0]["run"]
    assert given == [options]


def test_settings_of_a_run_come_from_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def simulated(config: RunConfig, engine: Engine, listeners: object) -> None:
        ran.append((config, engine))
        raise KeyboardInterrupt

    ran: list[tuple[RunConfig, Engine]] = []
    monkeypatch.setattr("simulations.run.simulate", simulated)
    assert main(["simulate"]) == 130
    texts = ["dataset=d", "model=m", "method=dense", "partition=iid", "device=cpu", "name=n"]
    numbers = ["rounds=7", "sites=6", "cohort=5", "epsilon=4.5", "final-density=1.0", "seed=3"]
    options = [word for each in (*texts, *numbers) for word in (f"--{each}".split("="))]
    sets = ["--set", "learning-rate=0.5", "--set", "rounds=9"]
    assert main(["simulate", *options, *sets, "--out", str(tmp_path)]) == 130
    assert main(["simulate", "--no-dp", "--final-density", "1"]) == 130
    (standard, engine), (chosen, _), (public, _) = ran
    assert standard == config_with({}) and engine == Engine() and not public.private
    given = {each.partition("=")[0]: each.partition("=")[2] for each in (*texts, *numbers)}
    assert given | {"learning-rate": "0.5", "out": str(tmp_path)} == {
        key: str(chosen.to_mapping()[key]) for key in (*given, "learning-rate", "out")
    }


@pytest.mark.parametrize("arguments", [[], ["report"], ["watch"], ["data"], ["data", "get"], ["methods", "show"]])
def test_what_lacks_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "the following arguments are required" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    out = capsys.readouterr().out
    for word in ("examples:", "--no-dp", "rounds-per-epoch", "--resume", "NOT private", "--gpus-per-actor"):
        assert word in out
    keys = out.partition("keys for --set")[2].splitlines()[1:]
    columns = {len(line) - len(line[2:].lstrip("abcdefghijklmnopqrstuvwxyz-").lstrip()) for line in keys if line}
    assert len(columns) == 1, "what keys mean stands in one column"


def test_ctrl_c_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    # What a shell puts in the background ignores SIGINT, and so would its children, were it not handled here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = [*QUICK, *SMALLER, "--rounds", "120", "--out", str(tmp_path), "--name", "x"]
    command = [sys.executable, "-W", "ignore", "-m", "simulations.cli", "simulate", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], env=os.environ
    )
    log = tmp_path / "x" / "run.jsonl"
    while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"fedsieve simulate --resume {tmp_path / 'x'}" in out
    assert main(["simulate", "--in-process", "--resume", str(tmp_path / "x")]) == 0


def test_a_ledger_from_its_making_to_its_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from client.ledger import Ledger
    from tests.support import small_plan

    path, policy = tmp_path / "site.ledger", tmp_path / "site.toml"
    policy.write_text('epsilon = 8\ndelta = 1e-5\nmodels = ["dp-cnn-s"]\n')
    assert main(["ledger", "create", str(path)]) == 0
    ledger = Ledger(path)
    for number in (1, 2):
        plan = small_plan(10, run="trial", round=number, sampling_rate=0.1, steps=5)
        ledger.charge(plan, plan.to_bytes(), "")
    ledger.close()
    capsys.readouterr()
    assert main(["ledger", "verify", str(path)]) == 0
    assert "2 entries, the chain is whole" in capsys.readouterr().out
    assert main(["ledger", "show", str(path), "--policy", str(policy)]) == 0
    shown = capsys.readouterr().out
    assert "trial" in shown and "of 8," in shown and "left" in shown and "add or remove one record" in shown
    assert main(["ledger", "show", str(path)]) == 2
    assert "--delta 1e-5" in capsys.readouterr().err
    assert main(["ledger", "export", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("number,time,server,run,round") and len(lines) == 3
    assert main(["ledger", "create", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_servers_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "server.key"
    assert main(["keys", "server", str(key)]) == 0
    assert re.search(r'server-key = "[0-9a-f]{64}"', capsys.readouterr().out)
    assert key.stat().st_mode & 0o077 == 0
    assert main(["keys", "server", str(key)]) == 2
