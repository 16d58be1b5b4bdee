"""Experiments: definitions, the resumable runner, and what is shown of it, on tiny real runs."""

import argparse
import io
import itertools
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from common.accounting import epsilon_of
from common.config import ConfigValue
from common.errors import ConfigError, RunFolderError
from common.models import initial_vector
from server.methods import open_policy
from server.planning import planned_history
from simulations import cli
from simulations.attacks.cli import add_attack
from simulations.crew import Workers
from simulations.experiments import definition, published
from simulations.experiments.cli import add_experiments
from simulations.experiments.definition import Experiment, PaperValue, load
from simulations.experiments.drawing import drawing
from simulations.experiments.masks import FrozenCount, as_figures, count_distribution, histograms, overlap
from simulations.experiments.masks import drawing as drawing_of_masks
from simulations.experiments.measures import MEASURES, _figures
from simulations.experiments.metrics import METRICS
from simulations.experiments.results import Results, estimate
from simulations.experiments.runner import RESULTS, carry_out, tasks_of
from simulations.experiments.show import Shown, lines_of, markdown_table, show
from simulations.report.summary import load_run
from simulations.run import Engine, config_with, defaults, simulate
from tests.support import small_config

_HERE = Workers(in_process=True)
_TINY = """\
title = "three clusters"
source = "none"
metrics = ["accuracy", "tail_accuracy", "uplink"]
seeds = [1, 2]
minutes = 0.1
notes = "Tiny."

[settings]
dataset = "tests.support:small_dataset"
model = "mlp:12-8-3"
rounds = 3
sites = 2
steps-per-round = 2
sampling-rate = 0.5
learning-rate = 0.1

[grid.epsilon]
eps1 = { epsilon = 1.0, noise-multiplier = 30.0 }
eps8 = { epsilon = 8.0, noise-multiplier = 5.0 }

[grid.method]
dense = { final-density = 1.0 }
rs = { final-density = 0.3 }

[paper]
eps1-rs = { value = 50.0, sem = 1.0 }
eps8-rs = 60

[differences]
gain = { of = "eps8-rs", minus = "eps8-dense", paper = -1.5 }

[quick]
seeds = [7]
rounds = 2
"""


def _file(tmp_path: Path, text: str = _TINY) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(text)
    return path


def _carry_out(experiment: Experiment, out: Path, *words: str, workers: Workers = _HERE) -> list[str]:
    with Results(out / RESULTS) as results:
        return carry_out(tasks_of([experiment], words), out, results, workers, Console(quiet=True))


def test_a_grid_is_all_combinations(tmp_path: Path) -> None:
    experiment = load(_file(tmp_path))
    assert [case.name for case in experiment.cases] == ["eps1-dense", "eps1-rs", "eps8-dense", "eps8-rs"]
    last = experiment.cases[-1]
    assert (last.settings["epsilon"], last.settings["final-density"], last.settings["rounds"]) == (8.0, 0.3, 3)
    assert experiment.cases[1].paper == PaperValue(50.0, 1.0) and last.paper == PaperValue(60.0)
    assert experiment.cases[0].paper is None
    assert experiment.total_minutes == pytest.approx(0.1 * 4 * 2)
    tasks = tasks_of([experiment])
    assert [task.seed for task in tasks] == [1] * 4 + [2] * 4, "a stopped runner has something of every case"
    assert [task.case.name for task in tasks_of([experiment], ["EPS8", "seed 2"])] == ["eps8-dense", "eps8-rs"]
    glance = load(experiment.path, quick=True)
    assert glance.seeds == (7,) and {case.settings["rounds"] for case in glance.cases} == {2}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rounds = 3", "round = 3", r"tiny\.toml: case 'eps1-dense': unknown run-config key 'round': did you mean"),
        ("rounds = 3", "rounds = 0", r"expected at least 1, got rounds=0"),
        ("rounds = 3", "seed = 3", r"'seed', which the runner sets itself"),
        ("epsilon = 8.0,", 'epsilon = "eight",', r"expected epsilon of type float, got 'eight'"),
        ("seeds = [1, 2]", "seeds = [1, 1]", r"different whole numbers, got \[1, 1\]"),
        ("seeds = [1, 2]", "", r"expected 'seeds' of type list"),
        ("seeds = [1, 2]", "seeds = []", r"different whole numbers, got \[\]"),
        ("seeds = [1, 2]", "seeds = [1, -1]", r"different whole numbers, got \[1, -1\]"),
        ("seeds = [1, 2]", "seeds = [1, true]", r"different whole numbers, got \[1, True\]"),
        ('metrics = ["accuracy", "tail_accuracy", "uplink"]', "metrics = []", r"'metrics' to be some of accuracy"),
        ("title =", "chart = 3\ntitle =", r"expected a table \[chart\], got 3"),
        (
            "eps1 = { epsilon = 1.0, noise-multiplier = 30.0 }",
            "eps1 = 1.0",
            r"expected \[grid.epsilon\] to have labels",
        ),
        ("rs = { final", f"{'r' * 41} = {{ final", r"40 at most, got 'r{41}' in \[grid.method\]"),
        ("eps8-rs = 60", "eps8-rs = true", r"expected a number or .* as the paper's 'eps8-rs', got True"),
        ("eps8-rs = 60", "eps8-rs = { sem = 1.0 }", r"expected a number or .*, got \{'sem': 1.0\}"),
        ("eps8-rs = 60", "eps8-rs = { value = 1.0, of = 2 }", r"expected a number or .*'of': 2"),
        (', minus = "eps8-dense", paper', ", paper", r"expected \[differences\] 'gain' = \{ of = case"),
        ('minus = "eps8-dense"', 'minus = "dense"', r"'gain' speaks of 'dense', but the cases are eps1-dense"),
        ('of = "eps8-rs"', 'if = 1, of = "eps8-rs"', r"expected \[differences\] 'gain' = "),
        ("[quick]", '[chart]\nx = "epsilon"\ny = 1\n[quick]', r"expected \[chart\] with 'x' = a setting"),
        ("[quick]", '[chart]\nx = "epsilon"\npanels = "sites"\n[quick]', r"another axis than 'epsilon', got 'sites'"),
        ('"accuracy", ', '"acuracy", ', r"'metrics' to be some of accuracy"),
        ("eps8-rs = 60", "eps9-rs = 60", r"\[paper\] has a value for 'eps9-rs', but the cases are eps1-dense"),
        ("eps8-rs = 60", 'eps8-rs = "60"', r"expected a number or .* as the paper's 'eps8-rs', got '60'"),
        ('of = "eps8-rs"', 'of = "rs"', r"'gain' speaks of 'rs'"),
        ("gain =", "eps1-rs =", r"which is a case"),
        ("rs = { final-density = 0.3 }", "rs = { epsilon = 0.3 }", r"two axes of the grid set 'epsilon'"),
        ("rs = { final", "'r s' = { final", r"expected labels of a-z, 0-9, '\.' and '-', 40 at most, got 'r s'"),
        ("minutes = 0.1", "minutes = 0", r"expected 'minutes' above 0"),
        ("title =", "titel =", r"unknown key 'titel'"),
        ("title =", "title", r"cannot read the experiment"),
        ('source = "none"', 'source = "none"\nmeasure = "guess"', r"'measure' to be one of run"),
        (
            "title =",
            'rows = "sites"\ntitle =',
            r"'rows' to be one of several axes, which are epsilon, method, got 'sites'",
        ),
        ("title =", 'rows = "method"\ntitle =', r"'rows' = 'method' have no place for values of \[paper\]"),
        ("[quick]", '[chart]\nx = "epsilon"\n[quick]\nepsilon = 2.0', r"\[quick\] sets 'epsilon', which is the 'x'"),
        ("[quick]", '[chart]\npanels = "method"\n[quick]', r"expected \[chart\] with 'x' = a setting"),
        ("[quick]", '[chart]\nx = "rounds"\n[quick]', r"a setting to which an axis gives numbers, got 'rounds'"),
        (
            "[quick]",
            '[chart]\nx = "epsilon"\npanels = "epsilon"\n[quick]',
            r"another axis than 'epsilon', got 'epsilon'",
        ),
    ],
)
def test_a_bad_definition_says_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert _TINY.count(old) >= 1
    with pytest.raises(ConfigError, match=message):
        load(_file(tmp_path, _TINY.replace(old, new)))


def test_a_paper_need_not_have_a_difference_and_a_seed_may_be_0(tmp_path: Path) -> None:
    (gain,) = load(_file(tmp_path)).differences
    assert (gain.of, gain.minus, gain.paper) == ("eps8-rs", "eps8-dense", PaperValue(-1.5))
    bare = load(_file(tmp_path, _TINY.replace(", paper = -1.5", "").replace("seeds = [1, 2]", "seeds = [0]")))
    assert bare.differences[0].paper is None and bare.seeds == (0,) and not bare.quick


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("", r"expected at least one \[grid.AXIS\] with labels"),
        ("[grid.a]", r"expected \[grid.a\] to have labels with settings"),
        ("[grid.a]\nx = {}\nx-y = {}\n[grid.b]\ny-z = {}\nz = {}", r"two cases have the same name"),
    ],
)
def test_a_grid_without_cases_or_with_one_twice(tmp_path: Path, grid: str, message: str) -> None:
    head, quick = _TINY.index("[grid.epsilon]"), _TINY.index("[quick]")
    with pytest.raises(ConfigError, match=message):
        load(_file(tmp_path, _TINY[:head] + grid + "\n" + _TINY[quick:]))
    one = load(_file(tmp_path, f"{_TINY[:head]}[grid.a]\n{'x' * 40} = {{}}\n{_TINY[quick:]}"))
    assert [case.name for case in one.cases] == ["x" * 40] and one.differences == ()


def test_every_shipped_definition_is_valid_in_full_and_quick() -> None:
    paths = definition.shipped()
    assert "table2-dp-cnn-s" in {path.stem for path in paths}
    for path in paths:
        for quick in (False, True):
            experiment = load(path, quick=quick)
            assert experiment.cases
    with pytest.raises(ConfigError, match=r"unknown experiment 'table9': expected one of .*table2-dp-cnn-s"):
        definition.find("table9")


def test_what_is_done_stays_done_until_the_definition_changes(tmp_path: Path) -> None:
    path, out = _file(tmp_path), tmp_path / "out"
    experiment = load(path)
    assert _carry_out(experiment, out, "eps8", "seed 1") == []
    log = out / "tiny" / "eps8-rs-seed1" / "run.jsonl"
    before = log.stat().st_mtime_ns
    assert _carry_out(experiment, out, "eps8") == []
    assert log.stat().st_mtime_ns == before
    with Results(out / RESULTS) as results:
        found = results.of(experiment, experiment.cases[-1])
        assert list(found) == [1, 2]
        assert found[1].figures["accuracy"] == load_run(log.parent).accuracy
        assert found[1].figures["accuracy"] != found[2].figures["accuracy"], "seeds must matter"
        changed = load(_file(tmp_path, _TINY.replace("learning-rate = 0.1", "learning-rate = 0.25")))
        assert results.of(changed, changed.cases[-1]) == {}
    assert _carry_out(changed, out, "eps8-rs", "seed 1") == []
    assert load_run(log.parent).config["learning-rate"] == "0.25"


def test_a_setting_that_is_new_since_then_counts_as_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load(_file(tmp_path))
    case = experiment.cases[0]
    with Results(tmp_path / RESULTS) as results:
        then = dict(experiment.measure.identity(case.settings))
        del then["server-averaging"]
        monkeypatch.setattr("simulations.experiments.results.json.dumps", lambda *_, **__: _dumped(then))
        results.keep(experiment, case, 1, {"accuracy": 0.5}, 1.0)
        monkeypatch.undo()
        assert results.find(experiment, case, 1) is not None
        changed = load(_file(tmp_path, _TINY.replace("rounds = 3", "rounds = 3\nserver-averaging = 0.5")))
        assert results.find(changed, changed.cases[0], 1) is None


def _dumped(value: object) -> str:
    import json

    return json.JSONEncoder().encode(value)


def test_a_killed_runner_goes_on_where_it_was(tmp_path: Path) -> None:
    path, out, whole = _file(tmp_path, _TINY.replace("rounds = 3", "rounds = 30")), tmp_path / "out", tmp_path / "whole"
    command = [sys.executable, "-m", "simulations.cli", "experiments", "run", str(path), "--in-process"]
    words = ["--only", "eps8", "seed 1"]
    process = subprocess.Popen([*command, "--out", str(out), *words], stdout=subprocess.DEVNULL)
    log = out / "tiny" / "eps8-rs-seed1" / "run.jsonl"  # the second of the two
    while not log.exists() or log.read_text().count('"round"') < 5:
        assert process.poll() is None, "the runner ended before it could be killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    experiment = load(path)
    dense, rs = experiment.cases[2:]
    with Results(out / RESULTS) as results:
        assert list(results.of(experiment, dense)) == [1] and results.of(experiment, rs) == {}
    before = (out / "tiny" / "eps8-dense-seed1" / "run.jsonl").stat().st_mtime_ns
    assert _carry_out(experiment, out, "eps8", "seed 1") == []
    assert (out / "tiny" / "eps8-dense-seed1" / "run.jsonl").stat().st_mtime_ns == before
    assert load_run(log.parent).resumed == 1, "the killed run went on from its checkpoint"
    assert _carry_out(experiment, whole, "eps8", "seed 1") == []
    with Results(out / RESULTS) as ours, Results(whole / RESULTS) as theirs:
        for case in (dense, rs):
            stopped, unbroken = (one.of(experiment, case)[1].figures for one in (ours, theirs))
            assert stopped["accuracy"] == unbroken["accuracy"] and stopped["epsilon"] == unbroken["epsilon"]


def test_one_runner_at_a_time(tmp_path: Path) -> None:
    import fcntl

    experiment = load(_file(tmp_path))
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match="another 'fedsieve experiments run' is at work"):
            _carry_out(experiment, tmp_path)


def test_a_failure_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _TINY.replace("rs = { final-density = 0.3 }", 'rs = { final-density = 0.3, partition = "no-such" }')
    path, out = _file(tmp_path, text), tmp_path / "out"
    arguments = ["experiments", "run", str(path), "--in-process", "--out", str(out), "--only", "eps8", "seed 1"]
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert "1 of 2 runs failed" in captured.err and "tiny eps8-rs seed 1: " in captured.err
    assert re.search(r"BAR experiment=tiny/eps8-dense paper=none ours=\d+\.\d\d sem=none seeds=1", captured.out)
    assert "BAR experiment=tiny/eps8-rs paper=60 ours=none sem=none seeds=0" in captured.out


def test_the_command_shows_paper_ours_and_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = _file(tmp_path), tmp_path / "out"
    assert cli.main(["experiments", "run", str(path), "--in-process", "--out", str(out)]) == 0
    capsys.readouterr()
    assert cli.main(["experiments", "show", str(path), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    experiment = load(path)
    with Results(out / RESULTS) as results:
        dense, rs = (
            [100 * results.of(experiment, c)[s].figures["accuracy"] for s in (1, 2)] for c in experiment.cases[2:]
        )
        assert lines_of(experiment, results)[-1].ours["accuracy"].seeds == 2
    mean, sem = sum(rs) / 2, abs(rs[0] - rs[1]) / 2
    assert f"BAR experiment=tiny/eps8-rs paper=60 ours={mean:.2f} sem={sem:.2f} seeds=2" in lines
    gains = [one - other for one, other in zip(rs, dense, strict=True)]
    gain, error = sum(gains) / 2, abs(gains[0] - gains[1]) / 2
    assert lines[-1] == f"BAR experiment=tiny/gain paper=-1.5 ours={gain:.2f} sem={error:.2f} seeds=2"
    assert [line.split()[1] for line in lines if line.startswith("BAR")] == [
        f"experiment=tiny/{name}" for name in ("eps1-dense", "eps1-rs", "eps8-dense", "eps8-rs", "gain")
    ]
    (row,) = [line for line in lines if line.strip().startswith("eps8-rs")]
    assert f"{mean:.2f} ± {sem:.2f}" in row and f"{mean - 60:+.2f}" in row and "2/2" in row
    assert f"command: fedsieve experiments run {path}" in lines
    assert "Tiny." in lines


@pytest.mark.parametrize("path", definition.shipped(), ids=lambda path: path.stem)
def test_a_narrow_screen_cuts_no_figure(path: Path) -> None:
    experiment = replace(load(path), rows=None)  # the screen has a row for each case
    with published.published_results([experiment]) as results:
        screen = Console(width=60, file=io.StringIO(), color_system=None)
        show([Shown(experiment, results)], ["fedsieve"], screen)
        written = markdown_table(experiment, results).splitlines()[2:]
    text = screen.file.getvalue()
    for row in written:
        cells = row.strip("| ").split(" | ")
        assert any(line.split() == " ".join(cells).split() for line in text.splitlines()), row


def test_every_shipped_case_that_pays_for_choices_has_a_noise_that_keeps_its_epsilon() -> None:
    """Choices may cost more than the whole epsilon; such a case would fail only when it is carried out, after hours."""
    tried: set[str] = set()
    keys = defaults().keys()
    for path, quick in itertools.product(definition.shipped(), (False, True)):
        for case in load(path, quick=quick).cases:
            known = {key: value for key, value in case.settings.items() if key in keys}
            config = config_with(known)
            neutral = {
                "sites": 1,
                "partition": "iid",
                "dataset": "",
                "learning-rate": 1.0,
            }  # change no noise multiplier
            key = repr(sorted({**known, **neutral}.items()))
            if config.is_private and config.how.uploads == "indices and values" and key not in tried:
                tried.add(key)
                policy = open_policy(config, initial_vector(config.model, 1).size)
                # Where the noise is calibrated: with the most that is tried, when choices alone cost.
                charges = planned_history(config, policy, config.noise_multiplier or 1e5)
                assert epsilon_of(charges, config.delta, config.accountant) <= config.epsilon, case.name
    assert len(tried) >= 9


def test_published_results_are_shown_and_completed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path)
    monkeypatch.setattr(definition, "shipped", lambda: [path])
    monkeypatch.setattr(published, "shipped", lambda: [path])
    folder = tmp_path / "published"
    monkeypatch.setattr(published.publish, "__defaults__", (folder,))
    monkeypatch.setattr(published.published_results.__wrapped__, "__defaults__", (folder,))
    here, there, new = (["--out", str(tmp_path / name)] for name in ("here", "there", "new"))
    assert cli.main(["experiments", "publish", "tiny", *here]) == 0
    assert "nothing was found yet" in capsys.readouterr().out
    assert cli.main(["experiments", "run", "tiny", "--in-process", "--only", "eps8", "seed 1", *here]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BAR")]
    assert cli.main(["experiments", "publish", "tiny", *here]) == 0
    lines = (tmp_path / "published" / "tiny.jsonl").read_text().splitlines()
    assert len(lines) == 3 and '"final-density": 0.3' in lines[2] and "final-density" not in lines[0]
    capsys.readouterr()

    assert cli.main(["experiments", "show", "tiny", *there]) == 0
    shown = capsys.readouterr().out
    assert "published results" in shown and [line for line in shown.splitlines() if line.startswith("BAR")] == found
    assert cli.main(["experiments", "run", "tiny", "--published", "--in-process", "--only", "eps8", *there]) == 0
    out = capsys.readouterr().out
    assert "2 of 4 runs were done already" in out and "BAR experiment=tiny/eps8-rs" in out and "seeds=2" in out
    assert not (tmp_path / "there" / "tiny" / "eps8-rs-seed1").exists()
    assert cli.main(["experiments", "show", "tiny", *there]) == 0
    shown = capsys.readouterr().out
    assert "published results" not in shown and "seeds=1" in shown, "own results alone, now that there are some"
    assert cli.main(["experiments", "show", "tiny", "--published", *there]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("BAR")] == found

    assert cli.main(["experiments", "run", "tiny", "--in-process", "--only", "eps1-rs", "seed 1", *new]) == 0
    assert cli.main(["experiments", "publish", "tiny", *new]) == 0
    lines = (tmp_path / "published" / "tiny.jsonl").read_text().splitlines()
    assert len(lines) == 4, "what was published stays so"
    capsys.readouterr()

    path.write_text(_TINY.replace("learning-rate = 0.1", "learning-rate = 0.25"))
    assert cli.main(["experiments", "show", "tiny", "--published", *there]) == 0
    assert "seeds=1" not in capsys.readouterr().out, "published for another definition"
    file = folder / "tiny.jsonl"
    content = file.read_text()
    file.write_text("{}\n{}\n")
    assert cli.main(["experiments", "show", "tiny", "--published", *there]) == 2
    assert "tiny.jsonl is not a file of published results (KeyError" in capsys.readouterr().err
    file.write_text(content)
    assert cli.main(["experiments", "publish", "tiny", "--out", str(tmp_path / "empty")]) == 0
    assert not file.exists(), "results of another definition are results no more"


def test_what_is_published_belongs_to_a_definition() -> None:
    known = {path.stem: load(path) for path in definition.shipped()}
    for path in sorted(published.FOLDER.glob("*.jsonl")):
        experiment = known[path.stem]
        with published.published_results([experiment]) as results:
            counted = sum(len(results.of(experiment, case)) for case in experiment.cases)
        assert counted == len(path.read_text().splitlines()) - 1, f"publish {path.stem} again: its definition changed"


def test_the_list_says_what_there_is_and_what_it_would_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, broken = _file(tmp_path), tmp_path / "broken.toml"
    broken.write_text("[title")
    monkeypatch.setattr(definition, "shipped", lambda: [broken, path])
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["experiments", "list"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].split()[:3] == ["broken", "not", "available:"] and "cannot read the experiment" in lines[0]
    assert lines[1:] == ["tiny    three clusters", "4 cases x 2 seeds, about 48 s of one CPU core; none"]
    assert cli.main(["experiments", "list", "--quick"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].strip() == "4 cases x 1 seed; none"
    assert cli.main(["experiments", "run", "--in-process", "--out", str(tmp_path), "--only", "eps9"]) == 2
    said = capsys.readouterr()
    assert "left out: " in said.out and "no case has all of eps9 in its name" in said.err
    with pytest.raises(ConfigError, match=r"unknown experiment 'large': expected one of broken, tiny, or"):
        definition.find("large")
    assert definition.find("tiny") == path and definition.find(str(path)) == path


def test_figures_are_written_as_papers_write_them() -> None:
    assert {name: metric.write(1234567.8) for name, metric in METRICS.items()} == {
        "accuracy": "123456780.00",
        "tail_accuracy": "123456780.00",
        "epsilon": "1234567.800",
        "uplink": "1.23",
        "downlink": "1.23",
        "uplink_saving": "1234567.8",
        "total_density": "1234567.800",
        "loss": "1234567.8000",
        "overlap": "1234567.800",
        "uniform_distance": "1234567.800",
        "control_distance": "1234567.800",
        "exposure": "1234567.80",
        "mse": "1234567.8000",
        "psnr": "1234567.8",
        "ssim": "1234567.800",
        "error": "1234567.80000",
        "bound": "1234567.80000",
        "solvable": "123456780.0",
        "ratio": "1234567.800",
    }
    accuracy = METRICS["accuracy"]
    assert (accuracy.write(0.5, sign=True), accuracy.write(-0.5, sign=True)) == ("+50.00", "-50.00")
    errors = [accuracy.write_error(value) for value in (0.0, 0.00012, 0.000012)]
    assert errors == ["0.00", "0.01", "0.001"], "a small error is not none"


def test_estimate() -> None:
    assert estimate([]) is None
    one, three = estimate([0.5]), estimate([1.0, 2.0, 6.0])
    assert one is not None and (one.mean, one.sem, one.seeds) == (0.5, None, 1)
    assert three is not None and three.mean == 3.0 and three.sem == pytest.approx((7 / 3) ** 0.5)


def test_a_file_that_is_no_results_is_refused(tmp_path: Path) -> None:
    path = tmp_path / RESULTS
    path.write_text("nonsense" * 100)
    with pytest.raises(RunFolderError, match="move it away"):
        Results(path)


def test_many_at_a_time_on_ray_give_the_same_results_and_failures(tmp_path: Path) -> None:
    text = _TINY.replace("eps1 = { epsilon = 1.0,", 'eps1 = { epsilon = 1.0, partition = "no-such[/x]",')
    experiment = load(_file(tmp_path, text))
    failures = [
        sorted(_carry_out(experiment, tmp_path / name, "seed 1", workers=workers))
        for name, workers in (("here", _HERE), ("ray", Workers(jobs=2)))
    ]
    assert failures[0] == failures[1] and len(failures[0]) == 2
    assert failures[0][0].startswith("tiny eps1-dense seed 1: ") and "no-such[/x]" in failures[0][0]
    with Results(tmp_path / "here" / RESULTS) as here, Results(tmp_path / "ray" / RESULTS) as ray:
        for case in experiment.cases[2:]:
            one, other = (dict(store.of(experiment, case)[1].figures) for store in (here, ray))
            for figures in (one, other):
                figures.pop("seconds")
            assert one == other


def test_the_figure_has_a_point_for_every_case_and_a_bar_for_its_error(tmp_path: Path) -> None:
    along = _TINY.replace("[quick]", '[chart]\nx = "epsilon"\n[quick]').replace("three clusters", "three clusters " * 9)
    experiment = load(_file(tmp_path, along))
    with Results(None) as results:
        assert drawing(experiment, results) is None, "nothing was measured"
        for number, case in enumerate(experiment.cases[:3]):
            for seed in experiment.seeds[: 1 if number == 0 else 2]:
                results.keep(experiment, case, seed, {"accuracy": 0.5 + 0.1 * number + 0.02 * seed}, 1.0)
        drawn = drawing(experiment, results)
        assert drawn is not None
        assert drawn.count('class="point"') == 3 + 2 and drawn.count('class="error"') == 2, "one seed has none"
        assert "dense: 73.00 \N{PLUS-MINUS SIGN} 1.00 at epsilon 8" in drawn
        assert drawn.count('class="title"') == 4, "a long title is broken, not cut off"
        by_method = load(_file(tmp_path, along.replace('x = "epsilon"', 'x = "epsilon"\npanels = "method"')))
        panels = drawing(by_method, results)
        assert panels is not None and panels.count('class="chart"') == 2 and panels.count('class="point"') == 3 + 2
        assert drawing(load(_file(tmp_path)), results) is None, "none was asked for"


def test_tables_of_the_docs_may_have_an_axis_as_rows(tmp_path: Path) -> None:
    papers = "[paper]\neps1-rs = { value = 50.0, sem = 1.0 }\neps8-rs = 60\n"
    experiment = load(_file(tmp_path, 'rows = "method"\n' + _TINY.replace(papers, "")))
    with Results(None) as results:
        for case in experiment.cases:
            for seed in {"eps8-dense": (), "eps1-dense": (2,)}.get(case.name, experiment.seeds):
                figures = {"accuracy": 0.5 + 0.02 * seed, "tail_accuracy": 0.25, "uplink": 3e6}
                results.keep(experiment, case, seed, figures, 1.0)
        assert markdown_table(experiment, results).splitlines() == [
            "| test accuracy of the last model, % | eps1 | eps8 |",
            "| --- | ---: | ---: |",
            "| dense | 54.00 (seeds: 1) | - |",
            "| rs | 53.00 \N{PLUS-MINUS SIGN} 1.00 | 53.00 \N{PLUS-MINUS SIGN} 1.00 |",
            "",
            "| test accuracy, mean of the last 5 evaluations, % | eps1 | eps8 |",
            "| --- | ---: | ---: |",
            "| dense | 25.00 (seeds: 1) | - |",
            "| rs | 25.00 | 25.00 |",
            "",
            "| uplink, MB | eps1 | eps8 |",
            "| --- | ---: | ---: |",
            "| dense | 3.00 (seeds: 1) | - |",
            "| rs | 3.00 | 3.00 |",
            "",
            "| test accuracy of the last model, % | paper | ours | difference | seeds "
            "| test accuracy, mean of the last 5 evaluations, % | uplink, MB |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            "| gain | -1.50 | - | - | 0/2 | - | - |",
        ]
        longer = replace(experiment, seeds=(1, 2, 3))
        head, _, row, *_ = markdown_table(longer, results).splitlines()
        assert head.startswith("| test accuracy of the last model, % (2 of 3 seeds) |") and "(seeds: 1)" in row


def test_how_often_parameters_are_masked_out(tmp_path: Path) -> None:
    measure = MEASURES["masks"]
    settings: dict[str, ConfigValue] = {
        "dataset": "tests.support:small_dataset",
        "model": "mlp:12-40-3",
        "rounds": 8,
        "sites": 1,
        "steps-per-round": 1,
        "noise-multiplier": 5.0,
        "value-coding": "f32",
        "downlink-coding": "f32",
    }
    measure.check(settings)
    random = measure.carry_out(settings, 1, tmp_path / "random", lambda share: None)
    assert 0.9 < random["overlap"] <= 1 and random["epsilon"] > 0
    shares = [random[f"masked_out_{times}"] for times in range(9)]
    assert sum(shares) == pytest.approx(1) and shares[8] == 0, "the first mask keeps all"
    assert sum(random[f"random_masked_out_{times}"] for times in range(9)) == pytest.approx(1)
    drawn = drawing_of_masks({"random": [random], "ranked": []})
    assert drawn is not None and drawn.count("<title>") == 1 + 2 * 9, "the drawing's, and one for each point"
    assert "independent random masks" in drawn and "ranked" not in drawn.split("<desc>")[1].split("</desc>")[1]
    assert drawing_of_masks({"random": [{"accuracy": 0.5}]}) is None
    for wrong in ({"value-coding": "calibrated"}, {"rounds-per-epoch": 2}, {"private": False}):
        with pytest.raises(ConfigError, match="to see which parameters move"):
            measure.check({**settings, **wrong})


def test_what_did_not_move_between_two_models_was_masked_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = iter(np.array([[1, 1, 1], [2, 1, 1], [3, 2, 1], [4, 2, 1]], np.float32))
    monkeypatch.setattr(
        "simulations.experiments.masks.Checkpoint.load", lambda path: SimpleNamespace(model=next(models))
    )
    count = FrozenCount(tmp_path)
    for event in ("run", "round", "round", "round", "other", "end"):
        count.follow({"event": event, "density": 0.5})
    assert count.counts is not None and count.counts.tolist() == [0, 2, 3] and count.densities == [0.5] * 3


def test_the_drawing_of_masks_has_the_means_of_the_seeds() -> None:
    one = as_figures(np.array([0.25, 0.75]), np.array([0.5, 0.5]))
    assert one == {"masked_out_0": 0.25, "masked_out_1": 0.75, "random_masked_out_0": 0.5, "random_masked_out_1": 0.5}
    other = as_figures(np.array([0.75, 0.25]), np.array([0.5, 0.5]))
    drawn = drawing_of_masks({"a": [one, {"accuracy": 0.5}, other], "b": [one], "c": [{}]})
    assert drawn is not None
    tips = re.findall(r"<title>(.*?)</title>", drawn)[1:]
    assert tips == [
        f"{series}: {share}.0 % {times} times"
        for series, shares in (
            ("a", (50, 50)),
            ("b", (25, 75)),
            ("independent random masks", (50, 50)),
        )
        for times, share in enumerate(shares)
    ]


def test_a_figure_shows_what_the_paper_found_and_the_upper_half_of_a_small_span(tmp_path: Path) -> None:
    papers = "[paper]\neps1-rs = { value = 50.0, sem = 1.0 }\neps8-rs = 60\n"
    along = _TINY.replace("[quick]", '[chart]\nx = "epsilon"\n[quick]')
    both = along.replace(papers, papers + "eps8-dense = 70\n")
    drawings = []
    for text, values in ((along, (0.5, 0.9)), (along, (0.4, 0.9)), (both, (0.5, 0.9)), (along, (0.45, 0.9))):
        experiment = load(_file(tmp_path, text))
        with Results(None) as results:
            for case, value in zip(experiment.cases[2:], values, strict=True):
                results.keep(experiment, case, 1, {"accuracy": value}, 1.0)
            drawings.append(drawing(experiment, results) or "")
    near, far, twice, half = drawings
    assert "50.00 at epsilon 1" in near and "60.00 at epsilon 8" in near and "paper" in near
    assert [one.count(">0<") for one in (near, far, half)] == [1, 2, 1], "from 0 but where all is in the upper half"
    assert "60.00 at epsilon 8" not in twice, "two values at one place are no line"
    assert "dense: 50.00 at epsilon 8" in near and near.count('class="point"') == 2 + 2
    assert "test accuracy of the last model, % by epsilon." in near


def test_the_tail_is_the_mean_of_the_last_five_evaluations_and_what_there_is_not_is_left_out(tmp_path: Path) -> None:
    figures = MEASURES["run"].carry_out(
        {**load(_file(tmp_path)).cases[3].settings, "rounds": 7}, 1, tmp_path / "some" / "run", lambda share: None
    )
    summary = load_run(tmp_path / "some" / "run")
    accuracies = [one.accuracy for one in summary.rounds]
    assert len(accuracies) == 7 and figures["tail_accuracy"] == pytest.approx(np.mean(accuracies[-5:]))  # type: ignore[arg-type]
    assert figures["uplink_saving"] == summary.dense_uplink / summary.uplink > 1
    assert (figures["uplink"], figures["downlink"]) == (summary.uplink, summary.downlink)
    assert (figures["epsilon"], figures["accuracy"]) == (summary.epsilon, accuracies[-1])
    assert {"loss", "seconds", "total_density"} <= figures.keys()
    bare = _figures(replace(summary, rounds=[], accuracy=None, uplink=0, epsilon=None))
    assert not bare.keys() & {"tail_accuracy", "accuracy", "uplink_saving", "epsilon"} and bare["uplink"] == 0


def test_settings_that_change_nothing_are_no_part_of_what_a_result_depends_on(tmp_path: Path) -> None:
    run, canaries = MEASURES["run"], MEASURES["canaries"]
    identity = run.identity({"rounds": 3})
    assert identity["rounds"] == 3 and not identity.keys() & {"name", "out", "resume", "seed"}
    assert canaries.identity({"rounds": 3, "canaries": 5}) == {
        **identity,
        "canaries": 5,
        "insertions": 3,
        "phrases": 10_000,
    }
    assert canaries.defaults() == {**run.defaults(), "canaries": 1000, "insertions": 3, "phrases": 10_000}
    for name in ("inversion", "linear"):
        attack = MEASURES[name]
        wanted = {"density": 0.5, "noise-multiplier": 0.0} if name == "inversion" else {"density": 0.5, "noise": 1.0}
        assert attack.identity(wanted) == {**attack.defaults(), **wanted}
        with pytest.raises(ConfigError, match="unknown setting 'rounds'"):
            attack.check({**wanted, "rounds": 3})


def test_the_commands_of_experiments_have_these_options(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_experiments(parser.add_subparsers())
    add_attack(parser._actions[1])  # type: ignore[arg-type]
    run = {"experiments": [], "out": Path("runs/experiments"), "quick": False, "published": False}
    here = {"only": [], "jobs": 0, "ray_address": None, "in_process": False}
    for words, expected in (
        ("experiments list", {"quick": False}),
        ("experiments list --quick", {"quick": True}),
        ("experiments run", {**run, **here}),
        (
            "experiments run a --quick --published --only b c --jobs 2 --in-process",
            {**run, **here, "experiments": ["a"], "quick": True, "published": True, "only": ["b", "c"], "jobs": 2}
            | {"in_process": True},
        ),
        ("experiments show a b", {**run, "experiments": ["a", "b"]}),
        ("experiments publish", {"experiments": [], "out": Path("runs/experiments"), "quick": False}),
        ("attack linear", {**run, **here, "experiments": ["linear"]}),
        (
            "attack inversion --jobs 3 --in-process",
            {**run, **here, "experiments": ["inversion"], "jobs": 3} | {"in_process": True},
        ),
    ):
        options = vars(parser.parse_args(words.split()))
        assert callable(options.pop("run")) and options == expected
    for words in (
        "experiments",
        "attack",
        "experiments list a",
        "experiments publish --quick",
        "experiments run --only",
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(words.split())


def test_a_runner_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("simulations.experiments.runner.carry_out", stopped)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["experiments", "run", str(_file(tmp_path)), "--in-process", "--out", str(tmp_path)]) == 130
    out = capsys.readouterr().out
    assert out == "stopped; what is done stays done: the same command goes on from here\n"


def test_notes_and_the_command_are_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path)
    with Results(None) as results:
        show([Shown(load(path), results), Shown(load(path, quick=True), results)], ("do", "it"), Console(width=200))
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("Tiny.") == 2
    assert [line for line in lines if line.startswith("command: ")] == [
        f"command: do it {path}",
        f"command: do it {path} --quick",
    ]
    assert "three clusters (a glance, not the paper's setting)" in "\n".join(lines)
    assert sum(line.endswith("seeds=0") for line in lines) == 2 * 5
    bare = load(_file(tmp_path, _TINY.replace('notes = "Tiny."', "")))
    with Results(None) as results:
        show([Shown(bare, results)], ("do", "it"), Console(width=200))
    assert not bare.notes and "Tiny" not in capsys.readouterr().out


def test_how_many_at_a_time_is_0_or_more(tmp_path: Path) -> None:
    assert cli.main(["experiments", "run", str(_file(tmp_path)), "--jobs", "-1", "--out", str(tmp_path)]) == 2


def test_results_of_a_newer_version_are_refused_and_those_behind_fill_gaps(tmp_path: Path) -> None:
    experiment = load(_file(tmp_path))
    one, other = experiment.cases[:2]
    with Results(tmp_path / "new" / RESULTS) as own, Results(None, own) as front:
        own.keep(experiment, one, 1, {"accuracy": 0.25}, 2.0)
        front.keep(experiment, other, 2, {"accuracy": 0.75}, 3.0)
        assert [sorted(front.of(experiment, case)) for case in (one, other)] == [[1], [2]]
        assert own.any_of(experiment) and own.find(experiment, other, 2) is None, "never written to"
        found = front.find(experiment, one, 1)
        assert found is not None and (found.figures, found.seconds) == ({"accuracy": 0.25}, 2.0)
        assert abs(found.finished - time.time()) < 60 and found.version == metadata.version("fedsieve")
    with sqlite3.connect(tmp_path / "new" / RESULTS) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (1,)
        file.execute("PRAGMA user_version = 2")
    with pytest.raises(RunFolderError, match="has version 2, this Fedsieve knows 1: use a newer one"):
        Results(tmp_path / "new" / RESULTS)
    infinite = estimate([1.0, float("inf")])
    assert infinite is not None and infinite.sem is None and infinite.seeds == 2


def test_the_histogram_of_masks_tells_random_ones_from_a_fixed_one() -> None:
    densities = np.array([1.0, 0.5, 0.25])
    assert count_distribution(densities) == pytest.approx([0.125, 0.5, 0.375, 0.0])
    kept = np.random.default_rng(1).random((3, 20_000)) < densities[:, None]
    assert overlap(*histograms((~kept).sum(0), densities)) > 0.98
    always = np.arange(20_000) < densities[:, None] * 20_000  # the same coordinates again and again
    assert overlap(*histograms((~always).sum(0), densities)) < 0.8


def test_with_one_site_a_round_an_epoch_is_a_round_a_step(tmp_path: Path) -> None:
    """What Table 2 relies on: rounds only cut the sequence of steps into pieces."""
    shared = {"sites": 1, "private": False, "sampling_rate": 1.0, "value_coding": "f32", "downlink_coding": "f32"}
    by_epoch = small_config(tmp_path, name="epochs", rounds=2, steps_per_round=3, rounds_per_epoch=1, **shared)
    by_step = small_config(tmp_path, name="steps", rounds=6, steps_per_round=1, rounds_per_epoch=3, **shared)
    one, other = (simulate(config, Engine(in_process=True)).model for config in (by_epoch, by_step))
    moved = one - initial_vector(by_epoch.model, by_epoch.seed)
    assert np.abs(moved).max() > 0.1
    assert one == pytest.approx(other, abs=1e-5)
