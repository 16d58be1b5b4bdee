"""The tool that breaks the product at random: what it changes, draws, runs and counts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import random_mutants, reach
from tests.mutants import PROJECT
from tests.mutations import mutants_of

SOURCE = '''"""A file of 3 lines."""
LIMIT = 5


def cut(values: list[int], longest: int = 2) -> list[int]:
    """Return at most 4."""
    logger.info("cut to %d", 7)
    if len(values) > longest and not values[0] == 1:
        raise ValueError(f"expected fewer than {longest + 1}")
    values.sort()
    return move(values, longest * 0.5, LIMIT)
'''
CHANGES = [
    ("number", "5 -> 6"),
    ("number", "2 -> 3"),
    ("and/or", "len(values) > longest and not values[0] == 1 -> len(values) > longest or not values[0] == 1"),
    ("comparison", "len(values) > longest -> len(values) >= longest"),
    ("not dropped", "not values[0] == 1 -> values[0] == 1"),
    ("comparison", "values[0] == 1 -> values[0] != 1"),
    ("number", "0 -> 1"),
    ("number", "1 -> 2"),
    ("raise dropped", 'raise ValueError(f"expected fewer than {longest + 1}") -> pass'),
    ("statement deleted", "values.sort() -> pass"),
    ("arguments swapped", "values, longest * 0.5 -> longest * 0.5, values"),
    ("arguments swapped", "longest * 0.5, LIMIT -> LIMIT, longest * 0.5"),
    ("arithmetic", "longest * 0.5 -> longest / 0.5"),
    ("number", "0.5 -> 1.0"),
]
NAMES = ("client", "common", "deployment", "server", "simulations")
MANY = [mutant for name in NAMES for number in range(9) for mutant in mutants_of(f"{name}/{number}.py", SOURCE)]


def test_every_small_change_is_a_mutant_and_texts_are_none() -> None:
    found = list(mutants_of("common/cut.py", SOURCE))
    assert [(mutant.kind, mutant.change) for mutant in found] == CHANGES
    assert [mutant.probe for mutant in found] == [None, 7, *[8] * 6, 9, 10, *[11] * 4]
    assert found[0].names == ("LIMIT",)
    for mutant in found:
        compile(mutant.applied(SOURCE), "cut.py", "exec")
    twice = list(mutants_of("common/twice.py", "A = 1 + 1\n"))
    assert [mutant.change for mutant in twice] == ["1 + 1 -> 1 - 1", "1 -> 2", "1 -> 2 (number 2)"]
    assert twice[2].applied("A = 1 + 1\n") == "A = 1 + 2\n"
    assert found[6].applied(SOURCE) == SOURCE.replace("values[0]", "values[1]")


def test_a_seed_draws_the_same_mutants_wherever_their_lines_are() -> None:
    drawn = random_mutants.chosen(1, MANY)
    moved = [
        mutant for name in NAMES for number in range(9) for mutant in mutants_of(f"{name}/{number}.py", "\n" + SOURCE)
    ]
    assert [mutant.key for mutant in random_mutants.chosen(1, moved)] == [mutant.key for mutant in drawn]
    assert random_mutants.chosen(2, MANY) != drawn
    assert [sum(mutant.file.startswith(name) for mutant in drawn) for name in NAMES] == [11, 11, 15, 11, 12]
    assert {mutant.kind for mutant in drawn} == {kind for kind, _ in CHANGES}


def test_another_mutant_takes_the_place_of_an_equivalent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random_mutants.chosen(1, MANY)
    monkeypatch.setattr(random_mutants, "EQUIVALENT", {drawn[0].key: "nobody can tell"})
    others = random_mutants.chosen(1, MANY)
    assert len(others) == len(drawn)
    assert drawn[0] not in others and len({*drawn} & {*others}) >= len(drawn) - 1 - CHANGES.count(CHANGES[0])


def test_every_equivalent_mutant_can_be_made() -> None:
    made = {mutant.key for mutant in random_mutants.possible(random_mutants.sources_of(PROJECT))}
    assert not random_mutants.EQUIVALENT.keys() - made, "take it out of tests/equivalent.py, or follow its line"


def test_what_is_likely_to_notice_runs_first() -> None:
    mutants = list(mutants_of("common/cut.py", SOURCE))
    cases = {"test_x.py::quick": (0.1, 8), "test_x.py::slow": (100.0, 8), "common/test_cut.py::own": (4.0, 8)}
    cases |= {"test_x.py::slower": (200.0, 8), "test_x.py::elsewhere": (0.1, 11)}
    tests = {name: {"seconds": cost, "lines": {"common/cut.py": [line]}} for name, (cost, line) in cases.items()}
    sources = {"common/cut.py": SOURCE}
    first, others = random_mutants.tests_for(mutants[2], tests, sources)
    assert list(first) == ["common/test_cut.py::own", "test_x.py::quick"] and list(others) == ["test_x.py::slow"]
    first, others = random_mutants.tests_for(mutants[0], tests, sources)  # at import
    assert list(first) == ["common/test_cut.py::own", "test_x.py::elsewhere"] and not others  # which uses LIMIT


@pytest.mark.parametrize(("survivors", "code"), [(0, 0), (1, 0), (2, 1)])
def test_the_bar(survivors: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    mutants = random_mutants.chosen(1, MANY)
    tried = [(mutant, None if number < survivors else "a test") for number, mutant in enumerate(mutants)]
    assert random_mutants.judged(tried) == code  # 13 of 15 in deployment are too few
    score, deployment = (60 - survivors) / 60, (15 - survivors) / 15
    line = f"BAR made=60 killed={60 - survivors} score={score:.3f} deployment={deployment:.3f}\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("seed", ["", "one", "-1", "1.5", "1 2"])
def test_what_is_no_seed(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert random_mutants.main(seed.split(" ")) == 2
    assert "expected a whole number as the seed" in capsys.readouterr().out


def test_statements_that_run_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reach.FILE, str(tmp_path / "rows"))
    monkeypatch.setattr(reach, "_seen", set())
    before = reach.begin("the test")
    scope = {"logger": type("Logger", (), {"info": print}), "move": lambda *arguments: arguments}
    exec(reach.instrumented("common/cut.py", SOURCE), scope)
    assert scope["cut"]([1, 0]) == ([0, 1], 1.0, 5)
    reach.begin(before)
    rows = (tmp_path / "rows").read_text().splitlines()
    assert rows == [f"the test\tcommon/cut.py\t{line}" for line in (7, 8, 10, 11)]


PRODUCT = """
def count_down(number):
    while number > 0:
        number -= 1
    return number
"""
TESTS = """
import pytest
from common.count import count_down

@pytest.fixture(scope="module")
def found():
    return count_down(2)

def test_other():
    assert True

def test_first(found):
    assert found < 2

def test_second(found):
    assert found == 0

def test_fails():
    assert count_down(2) == 1
"""
RUN = """
import json, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tests import random_mutants
from tests.mutations import mutants_of

random_mutants._PATIENCE = 1.0
project, kept = Path(sys.argv[1]), Path(sys.argv[2])
sources = {"common/count.py": (project / "common" / "count.py").read_text()}
with ProcessPoolExecutor(1, get_context("fork")) as forks:
    tests = random_mutants.measured(project, sources, kept, forks)
told = {name: test["lines"] for name, test in tests.items()}
for mutant in mutants_of("common/count.py", sources["common/count.py"]):
    if mutant.change in ("number > 0 -> number >= 0", "number -= 1 -> pass", "1 -> 2"):
        told[mutant.change] = random_mutants.tried(mutant, project, random_mutants.tests_for(mutant, tests, sources))
print(json.dumps(told))
"""


def test_a_mutant_is_dead_where_a_test_that_reaches_it_fails_or_does_not_end(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name, text in [("common/count.py", PRODUCT), ("tests/test_count.py", TESTS), ("pyproject.toml", "")]:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    shutil.copy(reach.__file__, project / "tests")
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(project), str(tmp_path)]
    ran = subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.PIPE, text=True)
    *_, left_out, told = ran.stdout.splitlines()
    assert left_out.endswith("test_count.py::test_fails")
    reached = {"common/count.py": [3, 4, 5]}
    found = json.loads(told)
    assert found.pop("number -= 1 -> pass") in ("tests/test_count.py::test_first", "tests/test_count.py::test_second")
    assert found == {
        "tests/test_count.py::test_other": {},
        "tests/test_count.py::test_first": reached,
        "tests/test_count.py::test_second": reached,  # in the fixture that both share
        "number > 0 -> number >= 0": "tests/test_count.py::test_second",
        "1 -> 2": None,
    }
