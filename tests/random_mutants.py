"""Break the product in small ways that nobody chose, and see whether a test notices: ``make random-mutants SEED=1``.

Each mutant is a copy of the project with one small change (tests/mutations.py) outside the privacy mechanism, which
``make mutants`` breaks on purpose. Only tests that reach the changed statement run on it, those likely to notice first.
Which ones reach it is measured by running every test once. What was measured and tried is kept in build/, so that a run
that was interrupted goes on.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in tests/conftest.py; torch is loaded here, before it

import compileall
import functools
import hashlib
import json
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from itertools import accumulate, islice, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings(action="ignore"):
    import flwr.clientapp  # noqa: F401
    import opacus  # noqa: F401

from tests.equivalent import EQUIVALENT
from tests.mutants import PROJECT, copy_project, run_tests
from tests.mutations import Mutant, mutants_of
from tests.reach import instrumented, probes

_COUNTS = {"deployment": 15, "simulations": 12, "server": 11, "common": 11, "client": 11}
_LEFT_OUT = (
    *("client/clipping/", "client/mechanisms/", "client/dpsgd.py", "client/selection.py"),  # the privacy mechanism
    *("common/accountants.py", "common/accounting.py", "common/charges.py", "common/noise.py", "common/renyi.py"),
    "client/rpc/",  # generated
    "simulations/benchmarks/",  # peers, measured: no user runs them
)
_BAR = 0.9
_KEPT = PROJECT / "build" / "random-mutants"
_QUICK = 5.0  # tests of less than so many seconds run first
_SECONDS = (10.0, 150.0)  # of tests on a mutant: in the first set, and in all
_PATIENCE = 30.0  # seconds that a test may take, and ten times what it took when it was measured

Test = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Try the mutants of a seed and end with the BAR line; 1 below the bar, 2 without a seed."""
    if len(arguments) != 1 or not re.fullmatch("[0-9]{1,9}", arguments[0]):
        print(f"expected a whole number as the seed, got {' '.join(arguments)!r} (make random-mutants SEED=1)")
        return 2
    _KEPT.mkdir(parents=True, exist_ok=True)
    forks = ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork"))
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary, forks:
        project = Path(temporary)
        copy_project(project)
        compileall.compile_dir(project, quiet=2)
        sources = sources_of(project)
        mutants = chosen(int(arguments[0]), possible(sources))
        results = _KEPT / f"{arguments[0]}-{_digest([*project.rglob('*.py'), *project.rglob('*.toml')])}.jsonl"
        killers = dict(map(json.loads, results.read_text().splitlines())) if results.exists() else {}
        for mutant in mutants:
            if mutant.name in killers:
                print(_told(mutant, killers[mutant.name]), flush=True)
        left = [mutant for mutant in mutants if mutant.name not in killers]
        tests = measured(project, sources, _KEPT, forks) if left else {}
        tries = {forks.submit(tried, mutant, project, tests_for(mutant, tests, sources)): mutant for mutant in left}
        for ended in as_completed(tries):
            mutant, killer = tries[ended], ended.result()
            killers[mutant.name] = killer
            with results.open("a") as file:
                file.write(json.dumps([mutant.name, killer]) + "\n")
            print(_told(mutant, killer), flush=True)
    return judged([(mutant, killers[mutant.name]) for mutant in mutants])


def possible(sources: dict[str, str]) -> Iterator[Mutant]:
    """Yield every mutant of the product outside the privacy mechanism."""
    for file, source in sources.items():
        if not file.startswith(_LEFT_OUT):
            yield from mutants_of(file, source)


def chosen(seed: int, mutants: Iterable[Mutant]) -> list[Mutant]:
    """Return the mutants of a seed: so many of each folder, every kind of change in turn, none that is equivalent.

    A mutant's rank depends on the seed and on its line alone, so that a change elsewhere leaves it where it was.
    """
    found: list[Mutant] = []
    ranked = sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed}{mutant.key}".encode()).digest())
    for folder, count in _COUNTS.items():
        kinds: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in ranked:
            if mutant.file.startswith(f"{folder}/") and mutant.key not in EQUIVALENT:
                kinds[mutant.kind].append(mutant)
        found.extend(islice((mutant for turn in zip_longest(*kinds.values()) for mutant in turn if mutant), count))
    return found


def tests_for(mutant: Mutant, tests: dict[str, Test], sources: dict[str, str]) -> list[dict[str, float]]:
    """Return the tests that reach a mutant, and what they take, in two sets: what is likely to notice, then others."""
    places, own = {(mutant.file, mutant.probe)}, f"/test_{Path(mutant.file).stem}.py"
    at_import = mutant.probe is None  # reached by who runs a statement that names what it defines, or tests its file
    if at_import:
        named = re.compile(rf"\b({'|'.join(mutant.names) or '$'})\b")
        places = {(file, line) for file, source in sources.items() for line in _lines_with(named, source)}
    reaching = sorted(
        (test["seconds"] > _QUICK, own not in name, test["seconds"], name)
        for name, test in tests.items()
        if any(line in test["lines"].get(file, ()) for file, line in places) or (at_import and own in name)
    )
    spent = list(accumulate(seconds for _, _, seconds, _ in reaching))
    first, last = (max(1, bisect_right(spent, seconds)) for seconds in _SECONDS)
    return [{name: seconds for _, _, seconds, name in some} for some in (reaching[:first], reaching[first:last])]


def judged(killers: Iterable[tuple[Mutant, str | None]]) -> int:
    """Print the BAR line of mutants and what killed them; return 1 below the bar."""
    dead = [(mutant.file.startswith("deployment/"), killer is not None) for mutant, killer in killers]
    deployed = [killed for in_deployment, killed in dead if in_deployment]
    killed = sum(killed for _, killed in dead)
    score, deployment = killed / len(dead), sum(deployed) / len(deployed)
    print(f"BAR made={len(dead)} killed={killed} score={score:.3f} deployment={deployment:.3f}")
    return int(min(score, deployment) < _BAR)


def _told(mutant: Mutant, killer: str | None) -> str:
    return f"killed    {mutant.name}  by {killer}" if killer else f"SURVIVED  {mutant.name}  in: {mutant.text}"


def _lines_with(named: re.Pattern[str], source: str) -> Iterator[int]:
    """Yield the first lines of the statements that have a name in them."""
    starts = sorted(probes(source))
    for number, text in enumerate(source.splitlines(), 1):
        if named.search(text) and starts and starts[0] <= number:
            yield starts[bisect_right(starts, number) - 1]


def sources_of(project: Path) -> dict[str, str]:
    """Return the files of the product by name."""
    paths = (path for folder in _COUNTS for path in sorted((project / folder).rglob("*.py")))
    return {path.relative_to(project).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def _digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def measured(project: Path, sources: dict[str, str], kept: Path, forks: ProcessPoolExecutor) -> dict[str, Test]:
    """Return what every test takes and reaches, from build/ where the product and its file are as they were."""
    files = {path for path in project.rglob("test_*.py") if path.parent.name != "browser"}
    shared = [path for path in project.rglob("*.py") if path not in files]
    found, asked = {}, {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        probed = Path(temporary)
        shutil.copytree(project, probed, dirs_exist_ok=True)
        for name, source in sources.items():
            (probed / name).write_text(instrumented(name, source), encoding="utf-8")
        compileall.compile_dir(probed, quiet=2)
        for path in sorted(files, key=lambda path: (path.parent.name not in ("deployment", "simulations"), path)):
            found[path] = kept / f"{path.stem}-{_digest([path, *shared])}.json"
            if not found[path].exists():
                name = path.relative_to(project).as_posix()
                asked[forks.submit(_measure, name, probed, found[path])] = name
        for number, ended in enumerate(as_completed(asked), 1):
            print(f"measured {number} of {len(asked)}: {asked[ended]}{ended.result()}", flush=True)
    ran = [path for path in found.values() if path.exists()]
    tests = {name: test for path in ran for name, test in json.loads(path.read_text()).items()}
    for name in [name for name, test in tests.items() if not test["passed"]]:
        print(f"left out, since it fails before anything is broken: {name}", flush=True)
        del tests[name]
    return tests


def _measure(file: str, probed: Path, result: Path) -> str:
    """Write what the tests of a file take and reach; return the end of their output where they could not be run."""
    with _copy(probed) as copy:
        found = copy.parent / "found"
        code = _in_fork(copy, [file, "--maxfail=1000"], _Measuring(found), limit=900)
        if not found.exists():
            return f" cannot be ({code})\n{(copy / 'output.txt').read_text(errors='replace')[-1000:]}"
        shutil.copy(found, result)
        return ""


def tried(mutant: Mutant, project: Path, sets: list[dict[str, float]]) -> str | None:
    """Return which test fails on a mutant, None where all pass."""
    for tests in filter(None, sets):
        with _copy(project) as copy:
            path = copy / mutant.file
            path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
            limit = 300 + 10 * sum(tests.values())
            code = _in_fork(copy, sorted({name.partition("::")[0] for name in tests}), _Selected(tests), limit)
            if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                failed = re.search(
                    r"^(FAILED|ERROR) (tests/.*?)( - |$)", (copy / "output.txt").read_text(errors="replace"), re.M
                )
                return failed[2] if failed else f"no end within {limit:.0f} s" if code is None else f"exit {code}"
    return None


class _Selected:
    """A pytest plugin that runs some tests in their order, each for as long as it may take."""

    def __init__(self, tests: dict[str, float]) -> None:
        self._tests = tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that were asked for."""
        known = {item.nodeid: item for item in items}
        items[:] = [known[name] for name in self._tests if name in known]
        for item in items:
            item.add_marker(pytest.mark.timeout(_PATIENCE + 10 * self._tests[item.nodeid]), append=False)


class _Measuring:
    """A pytest plugin that writes what every test takes and reaches, also in fixtures that it shares with others."""

    def __init__(self, result: Path) -> None:
        self._result, self._rows = result, result.with_name("rows")
        self._tests: dict[str, Test] = {}
        self._fixtures: dict[str, float] = defaultdict(float)

    def pytest_sessionstart(self) -> None:
        """Begin to write down what runs."""
        from tests import reach  # the copy's

        self._begin = reach.begin
        os.environ[reach.FILE] = str(self._rows)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Say that a test runs."""
        self._tests[item.nodeid] = {"seconds": 0.0, "passed": True, "of": [item.nodeid, *item.fixturenames]}
        _clear_caches()
        self._begin(item.nodeid)
        result = yield
        self._begin("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        """Count what a fixture of many tests does to each of them."""
        if fixturedef.scope == "function":
            return (yield)
        before, began = self._begin(fixturedef.argname), time.monotonic()
        result = yield
        self._fixtures[fixturedef.argname] += time.monotonic() - began
        self._begin(before)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how long a part of a test took and how it ended."""
        self._tests[report.nodeid]["seconds"] += report.duration
        self._tests[report.nodeid]["passed"] &= not report.failed

    def pytest_sessionfinish(self) -> None:
        """Write what was found."""
        lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for row in self._rows.read_text().splitlines() if self._rows.exists() else ():
            context, file, line = row.split("\t")
            lines[context][file].add(int(line))
        for test in self._tests.values():
            reached: dict[str, set[int]] = defaultdict(set)
            for context in test.pop("of"):
                test["seconds"] += self._fixtures.get(context, 0.0)
                for file in lines.get(context, ()):
                    reached[file] |= lines[context][file]
            test["lines"] = {file: sorted(found) for file, found in reached.items()}
        self._result.write_text(json.dumps(self._tests))


def _clear_caches() -> None:
    """Empty the caches of the project's functions, so that no test finds what another one has reached."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in (*_COUNTS, "tests"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


@contextmanager
def _copy(project: Path) -> Iterator[Path]:
    """Make a copy of a project in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as temporary:
        yield Path(shutil.copytree(project, Path(temporary, "copy")))


def _in_fork(copy: Path, arguments: list[str], plugin: Any, limit: float) -> int | None:
    """Run tests in a fork of their own; return pytest's exit code, None if they took too long.

    What they started, and is left, is in the fork's process group or has the copy's name in its environment.
    """
    ray = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))  # short, as sockets need it
    child = os.fork()
    if child == 0:
        os.setsid()
        os.environ["RAY_TMPDIR"] = str(ray)
        try:
            code = run_tests(copy, [*arguments, f"--basetemp={copy.parent / 't'}"], [plugin])
        except BaseException:
            code = 70
        os._exit(code)
    ends = time.monotonic() + limit
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ends:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or it is not ours
            if os.fsencode(copy) in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)
    shutil.rmtree(ray, ignore_errors=True)
    if not ended[0]:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
