"""The communication benchmark: what is done stays done, and its figures are what the logs say."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from common.errors import ConfigError, RunFolderError
from server.runlog import Event
from simulations import published_docs
from simulations.benchmarks import bytes as bench
from simulations.benchmarks import bytes_plan
from simulations.benchmarks.bytes_page import frontier_charts, reach_charts, rows
from simulations.benchmarks.bytes_plan import SYSTEMS, PlannedRun, Setting, Study, plan, quick_study
from simulations.benchmarks.bytes_recipes import RECIPES, Choice, Recipes
from simulations.benchmarks.bytes_results import (
    CurvePoint,
    SettingResult,
    SystemResult,
    bar,
    choose_headline,
    first_to_reach,
    frontier,
)
from simulations.benchmarks.bytes_runs import PUBLISHED, Found, carry_out, publish
from simulations.crew import Workers
from simulations.many_runs import config_to_start
from simulations.report.summary import load_run
from simulations.run import Engine, simulate
from tests.support import SMALL_MODEL

_HERE = Workers(in_process=True)
_ENGINE = Engine(in_process=True)
_BY_NAME = {system.name: system for system in SYSTEMS}
_RECIPES = """\
# Kept: [[chosen]] in a comment is none.
[search.short]
rounds = 2
steps-per-round = 2
sampling-rate = 1.0

[search.long]
rounds = 3
steps-per-round = 3
sampling-rate = 1.0
learning-rate = 0.5
"""


def _tiny() -> Study:
    return Study(
        dataset="tests.support:small_dataset",
        settings=(Setting("iid", 3.0), Setting("iid", 8.0)),
        systems=tuple(_BY_NAME[name] for name in ("dense f32", "RS 0.3, f32 + indices", "RS 0.3, calibrated 0.5")),
        seeds=(1, 2),
        base={"model": SMALL_MODEL, "sites": 3},
    )


def _recipes(tmp_path: Path, *chosen: str) -> Recipes:
    path = tmp_path / "recipes.toml"
    path.write_text(_RECIPES)
    kinds = ("dense", "rs")[: len(chosen)]
    pairs = zip(kinds, chosen, strict=True)
    entries = [Choice(kind, "iid", epsilon, name) for kind, name in pairs for epsilon in (3.0, 8.0)]
    Recipes.load(path).save(entries)
    return Recipes.load(path)


def _one(tmp_path: Path) -> PlannedRun:
    return plan(_tiny(), _recipes(tmp_path, "long", "long"), tmp_path / "out")[0]


def _result(name: str, accuracy: float, megabytes: int) -> SystemResult:
    uplink, downlink = megabytes * 10**6, 10**8
    curve = (CurvePoint(1, accuracy, uplink, uplink + downlink),)
    return SystemResult(_BY_NAME[name], "r", (1,), (accuracy,), (uplink,), (downlink,), 0, curve)


def _setting(epsilon: float, *systems: SystemResult, partition: str = "iid") -> SettingResult:
    return SettingResult(Setting(partition, epsilon), {one.system.name: one for one in systems})


def _stop_after(round_number: int) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if event["event"] == "round" and event["round"] == round_number:
            raise KeyboardInterrupt

    return listen


def test_a_finished_run_is_done_until_its_config_changes(tmp_path: Path) -> None:
    run = _one(tmp_path)
    found = Found()
    assert found.of(run) is None and config_to_start(run.config) == run.config
    simulate(run.config, _ENGINE)
    figures, summary = found.of(run), load_run(run.folder)
    assert figures is not None and [point.round for point in figures.points] == [1, 2, 3]
    assert (figures.uplink, figures.downlink, figures.accuracy) == (summary.uplink, summary.downlink, summary.accuracy)
    assert figures.points[-1].values == sum(one.admitted * one.kept for one in summary.rounds) > 0
    changed = replace(run, config=replace(run.config, learning_rate=0.25))
    assert found.of(changed) is None
    for number in (1, 2):
        assert config_to_start(changed.config) == changed.config
        assert not run.folder.exists(), "the run with the other config made way"
        assert load_run(run.folder.with_name(f"{run.folder.name}.{number}")).finished, "and is kept"
        simulate(run.config, _ENGINE)


def test_a_stopped_run_goes_on_and_is_done_then(tmp_path: Path) -> None:
    run = _one(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        simulate(run.config, _ENGINE, (_stop_after(2),))
    assert Found().of(run) is None
    config = config_to_start(run.config)
    assert config == replace(run.config, resume=True)
    simulate(config, _ENGINE)
    figures = Found().of(run)
    assert figures is not None and figures.resumed == 1 and [point.round for point in figures.points] == [1, 2, 3]


def test_a_run_with_indices_is_the_one_without_and_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    systems = tuple(_BY_NAME[name] for name in ("RS 0.3, f32", "RS 0.3, f32 + indices"))
    study = replace(_tiny(), systems=systems, settings=(Setting("iid", 8.0),), seeds=(1,))
    runs = plan(study, _recipes(tmp_path, "long", "long"), tmp_path / "out")
    carry_out(runs, Found(), _HERE, Console())
    assert "run 1/1" in capsys.readouterr().out and not runs[1].folder.exists(), "one training for both"
    computed = Found().of(runs[1])
    simulate(runs[1].config, _ENGINE)
    measured = Found().of(runs[1])
    assert computed is not None and measured is not None
    assert load_run(runs[1].folder).rounds[0].uplink.index > 0 == load_run(runs[0].folder).rounds[0].uplink.index
    for one, other in zip(computed.points, measured.points, strict=True):
        assert (one.round, one.accuracy, one.values) == (other.round, other.accuracy, other.values)
        # A length takes a byte more where the message is longer.
        assert one.uplink == pytest.approx(other.uplink, abs=2 * 3 * one.round)


def test_published_runs_count_as_done_where_asked_for(tmp_path: Path) -> None:
    study = replace(_tiny(), settings=(Setting("iid", 8.0),), seeds=(1,))
    recipes = _recipes(tmp_path, "long", "long")
    runs = plan(study, recipes, tmp_path / "out")
    carry_out(bytes_plan.only(runs, ["RS"]), Found(), _HERE, Console(quiet=True))
    file = tmp_path / "published" / "bytes.jsonl"
    assert publish(runs, Found(), file) == 2, "of three systems"
    elsewhere = plan(study, recipes, tmp_path / "elsewhere")
    known = Found(file)
    assert [known.of(run) is None for run in elsewhere] == [True, False, False]
    for here, there in zip(runs[1:], elsewhere[1:], strict=True):
        ours, theirs = Found().of(here), known.of(there)
        assert ours is not None and theirs is not None
        assert theirs == replace(ours, seconds=round(ours.seconds)) and Found().of(there) is None
    changed = replace(elsewhere[2], config=replace(elsewhere[2].config, grid=1.0))
    assert known.of(changed) is None, "another config is another run"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0].replace('"server-averaging": 0.0, ', ""), lines[1].replace("grid", "gone")]))
    older = Found(file)
    assert older.of(elsewhere[1]) == known.of(elsewhere[1]), "a key that is new since then has its default"
    assert older.of(elsewhere[2]) is None, "a key that is gone since then may have changed anything"
    file.write_text("\n".join(lines))
    assert publish(elsewhere, known, file) == 2, "what was published stays published"

    file.write_text(file.read_text().replace('"points": [', '"points": [7, '))
    with pytest.raises(RunFolderError, match=r"bytes.jsonl is not a file of published runs .*: restore it with git"):
        Found(file)


def test_the_published_runs_are_of_this_benchmark() -> None:
    study = bytes_plan.full_study(needs_data=False)
    recipes = Recipes.load(RECIPES)
    runs = plan(study, recipes, Path("nowhere")) + bytes_plan.search_plan(study, recipes, Path("nowhere"))
    found = Found(PUBLISHED)
    counted = [run for run in runs if run.without_indices is None and found.of(run) is not None]
    assert len(counted) == len(PUBLISHED.read_text().splitlines()) > 0, "publish again: recipes or defaults changed"


@pytest.mark.parametrize("lost", ["checkpoint.npz", "run.jsonl", "config.toml"])
def test_a_stopped_run_that_lacks_a_file_starts_anew(tmp_path: Path, lost: str) -> None:
    run = _one(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        simulate(run.config, _ENGINE, (_stop_after(2),))
    (run.folder / lost).unlink()
    assert config_to_start(run.config) == run.config and not run.folder.exists()


def test_every_run_has_a_folder_of_its_own_and_a_config_that_is_valid(tmp_path: Path) -> None:
    study = Study(
        dataset="fashion-mnist",
        settings=tuple(Setting(partition, epsilon) for partition in ("iid", "dirichlet:0.3") for epsilon in (3.0, 8.0)),
        systems=SYSTEMS,
        seeds=(1, 2, 3),
    )
    runs = plan(study, Recipes.load(RECIPES), tmp_path)
    assert len(SYSTEMS) == 16 and len({run.folder for run in runs}) == len(runs) == 192
    assert all(20 <= run.config.rounds // run.config.evaluate_every < 40 for run in runs), "enough to draw a curve"
    first = {run.system.name: run.config for run in runs[: len(SYSTEMS)]}
    plain, ours = first["RS 0.1, f32 + indices"], first["RS 0.1, calibrated 1"]
    assert (plain.value_coding, plain.index_coding, plain.downlink_coding) == ("f32", "raw", "f32")
    assert (ours.value_coding, ours.index_coding, ours.downlink_coding) == ("calibrated", "seed", "calibrated")
    assert (ours.grid, ours.final_density, first["dense int8"].final_density) == (1.0, 0.1, 1.0)
    assert [run.system.name for run in bytes_plan.only(runs, ["IID", "epsilon 3", "int8", "seed 2"])] == ["dense int8"]
    with pytest.raises(ConfigError, match="no run has all of mnist-9"):
        bytes_plan.only(runs, ["mnist-9"])


def test_the_quick_benchmark_is_six_runs_of_the_defaults(tmp_path: Path) -> None:
    runs = plan(quick_study(), None, tmp_path)
    assert len(runs) == 6 and {(run.config.rounds, run.config.dataset) for run in runs} == {(20, "fashion-mnist-12k")}


def test_a_missing_choice_and_a_recipe_that_says_too_much_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \[\[chosen\]\] with kind='rs', partition='iid', epsilon=3.*--search"):
        plan(_tiny(), _recipes(tmp_path, "long"), tmp_path)
    path = tmp_path / "recipes.toml"
    _recipes(tmp_path, "long", "long")
    path.write_text(path.read_text().replace("rounds = 3", "rounds = 3\ngrid = 2.0\nepsilon = 9.0"))
    with pytest.raises(ConfigError, match="recipe 'long' sets epsilon, which the benchmark sets itself"):
        plan(_tiny(), Recipes.load(path), tmp_path)
    path.write_text(_RECIPES + '[[chosen]]\nkind = "rs"\npartition = "iid"\nepsilon = 3.0\nrecipe = "lost"\n')
    with pytest.raises(ConfigError, match="'lost' is not in"):
        Recipes.load(path)


def test_bytes_to_reach_is_the_first_point_that_is_good_enough() -> None:
    curve = [CurvePoint(n, accuracy, 10.0 * n, 30.0 * n) for n, accuracy in enumerate((0.5, 0.8, 0.7, 0.9), start=1)]
    found = [first_to_reach(curve, goal) for goal in (0.4, 0.75, 0.8, 0.85, 0.95)]
    assert [point and point.uplink for point in found] == [10, 20, 20, 40, None]


def test_the_charts_of_bytes_to_reach_have_a_dot_for_each_system_that_came_there() -> None:
    late = (CurvePoint(1, 0.5, 2e6, 7e6), CurvePoint(2, 0.796, 4e6, 9e6))
    systems = [replace(_result(name, 0.80, 1), curve=late) for name in ("dense f32", "RS 0.1, calibrated 1")]
    poor = replace(_result("dense int8", 0.60, 1), curve=(CurvePoint(1, 0.60, 10, 20),))
    up, both = reach_charts(_setting(3.0, *systems, poor))
    for chart, cost in ((up, "4 MB"), (both, "9 MB")):
        assert chart.drawing.count(f": {cost}, then 80.0 % in the end</title>") == 2
        assert "dense int8:" not in chart.drawing
    assert [series.label for series in up.legend] == ["dense f32", "dense int8", "RS calibrated"]


def test_the_frontier_never_falls_and_takes_the_cheapest_of_equals() -> None:
    first = [CurvePoint(1, 0.5, 10, 0), CurvePoint(2, 0.7, 20, 0), CurvePoint(3, 0.6, 30, 0)]
    second = [
        CurvePoint(1, 0.4, 5, 0),
        CurvePoint(2, 0.65, 20, 0),
        CurvePoint(3, 0.7, 25, 0),
        CurvePoint(4, 0.8, 40, 0),
    ]
    assert [(point.uplink, point.accuracy) for point in frontier([first, second])] == [
        (5, 0.4),
        (10, 0.5),
        (20, 0.7),
        (40, 0.8),
    ]
    assert frontier([[], []]) == []


def test_the_frontiers_chart_leaves_out_how_trainings_begin() -> None:
    curve = (CurvePoint(1, 0.40, 10, 20), CurvePoint(2, 0.70, 20, 40), CurvePoint(3, 0.84, 30, 60))
    dense = replace(_result("dense f32", 0.84, 1), curve=curve)
    poor = replace(_result("dense int8", 0.60, 1), curve=(CurvePoint(1, 0.60, 10, 20),))
    [chart] = frontier_charts([_setting(3.0, dense, poor)])
    assert [(series.label, [point.y for point in series.points]) for series in chart.legend] == [
        ("dense f32", [0.70, 0.84])
    ]


def test_the_headline_saves_most_among_those_that_are_as_accurate() -> None:
    results = [
        _setting(
            epsilon,
            _result("dense f32", 0.80, 1000),
            _result("RS 0.3, f32", 0.80, 10),  # not calibrated: never the headline
            _result("RS 0.5, calibrated 1", 0.82, 100),
            _result("RS 0.3, calibrated 1", 0.795, uplink),
            _result("RS 0.1, calibrated 1", accuracy, 20),
        )
        for epsilon, uplink, accuracy in ((3.0, 50, 0.79), (8.0, 40, 0.83))
    ]
    headline = choose_headline([*results, _setting(3.0, _result("dense f32", 0.9, 1), partition="dirichlet:0.3")])
    assert headline is not None and headline.qualifies and headline.system == "RS 0.3, calibrated 1"
    assert headline.uplink_saving == pytest.approx(1000 / 50)
    assert headline.total_saving == pytest.approx(1100 / 150)
    assert "of dense f32 at every epsilon (iid): 20.0x" in str(headline)
    dense, ours = _result("dense f32", 0.7, 1000), _result("RS 0.3, calibrated 1", 0.71, 100)
    wider = choose_headline([*results, _setting(3.0, dense, ours, partition="dirichlet:0.3")])
    assert wider is not None and "(iid and dirichlet:0.3): 10.0x fewer bytes up" in str(wider)
    assert bar(results, headline) == {
        "uplink_saving": "20.00",
        "total_saving": "7.33",
        "accuracy_gap": "0.50",
        "best_accuracy": "82.00",
    }
    assert rows(results[0])[3] == ["RS 0.3, calibrated 1", "79.50", "50.00", "100.00", "20.00x", "7.33x", "50.00"]
    assert rows(results[0])[4][-1] == "-", "never reached"


def test_without_a_system_that_qualifies_the_headline_is_the_one_that_loses_least() -> None:
    dense = _result("dense f32", 0.80, 1000)
    result = _setting(3.0, dense, _result("RS 0.3, calibrated 1", 0.7949, 50), _result("RS 0.1, calibrated 1", 0.7, 20))
    headline = choose_headline([result])
    assert headline is not None and not headline.qualifies and headline.system == "RS 0.3, calibrated 1"
    assert "none of them stays within 0.5 points" in str(headline)
    assert choose_headline([_setting(3.0, _result("RS 0.3, calibrated 1", 0.8, 50))]) is None
    assert set(bar([], None).values()) == {"none"}


def test_a_system_that_lacks_a_seed_is_shown_and_not_compared() -> None:
    def thrice(result: SystemResult) -> SystemResult:
        figures = {name: getattr(result, name) * 3 for name in ("accuracies", "uplinks", "downlinks")}
        return replace(result, seeds=(1, 2, 3), **figures)

    dense, sparse = thrice(_result("dense f32", 0.80, 1000)), thrice(_result("RS 0.5, calibrated 1", 0.80, 100))
    lucky, other = _result("RS 0.1, calibrated 1", 0.85, 20), _result("dense f16", 0.84, 500)
    result = _setting(3.0, dense, sparse, lucky, other)
    headline = choose_headline([result])
    assert headline is not None and headline.system == "RS 0.5, calibrated 1"
    assert bar([result], headline)["best_accuracy"] == "80.00"
    assert result.frontiers["RS calibrated"] == list(sparse.curve)
    assert result.frontiers["dense f16"] == list(other.curve)
    assert len(rows(result)) == 4


def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = _recipes(tmp_path)
    monkeypatch.setattr(bench, "RECIPES", recipes.path)
    monkeypatch.setattr(bytes_plan, "full_study", lambda **_: _tiny())
    out = tmp_path / "out"
    assert bench.main(["--out", str(out)], _HERE) == 2
    assert "no [[chosen]]" in capsys.readouterr().err

    assert bench.main(["--search", "--out", str(out), "--only", "epsilon 3"], _HERE) == 0
    assert [choice.epsilon for choice in Recipes.load(recipes.path).choices] == [3.0, 3.0]
    assert bench.main(["--search", "--out", str(out)], _HERE) == 0
    assert "4 of 8 trainings were done already" in capsys.readouterr().out
    assert len(Recipes.load(recipes.path).choices) == 4
    assert recipes.path.read_text().startswith(_RECIPES.rstrip())

    assert bench.main(["--out", str(out), "--only", "seed 1"], _HERE) == 0
    assert "6 of 12 runs" in (out / "bytes.html").read_text()
    assert bench.main(["--out", str(out)], _HERE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "6 of 12 trainings were done already" in lines
    assert re.fullmatch(r"BAR uplink_saving=\S+ total_saving=\S+ accuracy_gap=\S+ best_accuracy=\S+", lines[-1])
    assert "within 0.5 points of dense f32" in lines[-2]

    report = json.loads((out / "bytes.json").read_text())
    first = report["settings"][0]["systems"][2]
    assert first["system"]["name"] == "RS 0.3, calibrated 0.5" and first["seeds"] == [1, 2]
    runs = [load_run(out / f"iid-eps3-rs-0.3-calibrated-0.5-seed{seed}") for seed in (1, 2)]
    assert first["uplink"] == sum(run.uplink for run in runs) / 2 == pytest.approx(first["curve"][-1]["uplink"])
    assert first["accuracy"] == pytest.approx(first["curve"][-1]["accuracy"])
    assert first["downlink"] + first["uplink"] == pytest.approx(first["curve"][-1]["total"])

    page = tmp_path / "page.md"
    marks = [f"<!-- published: {name} -->\nold\n<!-- end of published -->\n" for name in ("bytes-search", "bytes")]
    page.write_text("".join([*marks, "after\n"]))
    monkeypatch.setattr(bench, "PUBLISHED", tmp_path / "bytes.jsonl")
    monkeypatch.setattr(bench, "POSTER", tmp_path / "frontier.svg")
    monkeypatch.setattr(published_docs, "pages", lambda: [page])
    assert bench.main(["--publish", "--out", str(out)], _HERE) == 0
    assert "20 trainings written to" in capsys.readouterr().out.replace("\n", " "), "12 and the 8 of the search"
    assert lines[-1] in page.read_text() and "| RS 0.3, f32 + indices |" in page.read_text()
    assert "old" not in page.read_text() and page.read_text().endswith("\n<!-- end of published -->\nafter\n")
    search_head, _, *tried = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("|")][:4]
    assert search_head[1:] == [
        "iid, epsilon 3, dense",
        "iid, epsilon 3, rs",
        "iid, epsilon 8, dense",
        "iid, epsilon 8, rs |",
    ]
    best = {choice.where: choice for choice in Recipes.load(recipes.path).choices}["rs", "iid", 3.0]
    marked = {row[0].removeprefix("| "): row[2] for row in tried}
    assert best.accuracy is not None and marked[best.recipe] == f"**{100 * best.accuracy:.2f}**"
    assert (tmp_path / "frontier.svg").read_text() == (out / "frontier.svg").read_text()
    assert bench.main(["--show", "--published", "--out", str(tmp_path / "elsewhere")], _HERE) == 0
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1], "nothing was run again"
    assert (tmp_path / "elsewhere" / "bytes.html").read_text() == (out / "bytes.html").read_text()

    html = (out / "bytes.html").read_text()
    assert not re.search(r"https?://|//\w|@import|url\(|<script|<link|<img", html)
    assert html.count("<svg") == html.count('role="img" aria-label') == 10, (
        "two frontiers, four charts for each setting"
    )
    drawing = (out / "frontier.svg").read_text()
    assert ElementTree.fromstring(drawing).tag == "{http://www.w3.org/2000/svg}svg"
    assert re.findall(r"https?://[^\"]*|@import|url\(", drawing) == ["http://www.w3.org/2000/svg"], "its name space"


def test_an_interrupted_benchmark_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "RECIPES", _recipes(tmp_path, "short", "short").path)
    monkeypatch.setattr(bytes_plan, "full_study", lambda **_: _tiny())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("simulations.many_runs.simulate", interrupt)
    assert bench.main(["--out", str(tmp_path), "--only", "RS 0.3"], _HERE) == 130
    assert "go on with: python -m simulations.benchmarks.bytes --out" in capsys.readouterr().out
