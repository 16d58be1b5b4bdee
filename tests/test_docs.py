"""The documentation tells the truth: its commands run, its files work, its links lead somewhere.

``docs/README.md`` says what the comments above a block mean. Commands that are not run here must at least be accepted
by our own parser, with settings that exist, or be targets of the Makefile.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import pytest

from client.policy import SitePolicy
from common import datasets
from common.config import parse_assignment
from common.errors import FedsieveError
from simulations import cli, published_docs
from simulations.benchmarks import bytes as bytes_benchmark
from simulations.benchmarks.bytes_runs import PUBLISHED
from simulations.experiments import definition
from simulations.experiments.drawing import drawing
from simulations.experiments.published import published_results
from simulations.experiments.show import markdown_table
from simulations.run import config_with, defaults

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = sorted([_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *(_ROOT / "docs").glob("*.md")])
_SHELL = ("sh", "console", "")
_SMALL = (  # noise that is given, since most of the time of so short a run would go into calibrating it
    "--in-process --rounds 2 --set steps-per-round=1 --set sampling-rate=0.02 --set evaluate-every=2 "
    "--set noise-multiplier=2"
)
_MARKER = re.compile(r"<!-- (run|run small|run by|file)(?:: (.+?))? -->\s*")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block with the comment above it: ``order`` (run, run small, run by, file) and its ``argument``."""

    page: str
    language: str
    text: str
    order: str
    argument: str

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, one a line, continued lines joined and comments left out."""
        if self.language not in _SHELL:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        if not self.language:  # may be a drawing or an output as well
            lines = [line for line in lines if re.match(r"(\w+=\S+ )*(fedsieve|make|flwr|python) ", line)]
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _blocks(page: Path) -> list[Block]:
    text, found = page.read_text(encoding="utf-8"), []
    for match in _FENCE.finditer(text):
        above = text[: match.start()].rsplit("\n\n", 1)[-1]
        marker = _MARKER.fullmatch(above)
        order, argument = (marker[1], marker[2] or "") if marker else ("", "")
        found.append(Block(page.relative_to(_ROOT).as_posix(), match[1], match[2], order, argument))
    return found


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a line, without redirections and assignments in front."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            redirected = word[0] in "<>"
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words:
                yield words
            words = ["redirected"] if redirected else []
        else:
            words.append(word)


_ALL = [block for page in _PAGES for block in _blocks(page)]
_COMMANDS = [(block.page, command) for block in _ALL for command in block.commands]


def _of(program: str) -> list[tuple[str, list[str]]]:
    return [(page, words) for page, line in _COMMANDS for words in _simple_commands(line) if words[0] == program]


def _refusal(words: list[str]) -> str | None:
    """Return why our parser would not take a command, or its settings; None if it would."""
    try:
        options = cli._parser().parse_args(words[1:])
    except SystemExit as exit_:
        return None if exit_.code == 0 else "refused by the parser"
    if words[1] != "simulate":
        return None
    try:
        given = dict(parse_assignment(text, defaults()) for text in options.set)
        keys = {key: getattr(options, key.replace("-", "_"), None) for key in defaults()}
        # --resume is also a key, but a folder here.
        config_with(given | {key: value for key, value in keys.items() if value is not None and key != "resume"})
    except FedsieveError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("page", "words"), _of("fedsieve"), ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60]
)
def test_every_fedsieve_command_is_accepted(page: str, words: list[str]) -> None:
    assert (refusal := _refusal(words)) is None, f"{page}: {' '.join(words)}: {refusal}"


def test_the_check_of_commands_notices_mistakes() -> None:
    for wrong in ("simulte", "simulate --epsilo=x", "simulate --set epsilonn=3", "simulate --final-density 2", "watch"):
        assert _refusal(["fedsieve", *wrong.split()]) is not None, wrong
    assert _refusal(["fedsieve", "simulate", "--set", "grid=1"]) is None
    line = "A=1 fedsieve report a > b && make demo | cat"
    assert [words[0] for words in _simple_commands(line)] == ["fedsieve", "redirected", "make", "cat"]


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(), re.M))
    asked = {(page, word) for page, words in _of("make") for word in words[1:] if "=" not in word}
    inline = {
        (page.name, word)
        for page in _PAGES
        for word in re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8"))
    }
    assert asked and inline
    assert not (missing := [one for one in asked | inline if one[1] not in targets]), missing


def test_every_command_says_who_runs_it() -> None:
    mine = [block for block in _ALL if block.commands]
    silent = [(block.page, block.commands[0]) for block in mine if block.order not in ("run", "run small", "run by")]
    assert not silent
    assert len(mine) > 15
    runners = [runner for block in _ALL if block.order == "run by" for runner in block.argument.split(", ")]
    assert not [runner for runner in runners if not (_ROOT / runner).is_file()]


_WITH_COMMANDS = [page for page in _PAGES if any(block.order in ("run", "run small") for block in _blocks(page))]


@pytest.mark.parametrize("page", _WITH_COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(datasets, "load", lru_cache(datasets.load))  # most commands read the same file, twice
    before = set(sys.modules)
    try:
        for block in _blocks(page):
            if block.order == "file":
                target = tmp_path / block.argument
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text, encoding="utf-8")
            elif block.order in ("run", "run small"):
                for command in block.commands:
                    _run(command, small=block.order == "run small")
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "my_package":
                del sys.modules[name]


def test_every_key_of_a_policy_is_explained() -> None:
    text = (_ROOT / "docs/privacy.md").read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if line.startswith("| `")]
    told = {key for line in table for key in re.findall(r"`([a-z-]+)`", line.split(" | ")[0])}
    assert told >= {one.name.replace("_", "-") for one in fields(SitePolicy)}


def _run(command: str, *, small: bool) -> None:
    """Run a command: our own in this process, which has torch loaded already; others in a shell."""
    words = shlex.split(command, comments=True)
    while words[0].startswith("PYTHONPATH="):
        words.pop(0)
    if words[0] != "fedsieve":
        subprocess.run(["bash", "-euo", "pipefail", "-c", command], check=True, timeout=120)
        return
    assert len([*_simple_commands(command)]) == 1, (
        f"{command}: pipes and redirections are for commands that are not run"
    )
    assert cli.main([*words[1:], *(_SMALL.split() if small and words[1] == "simulate" else [])]) == 0, command


def _slug(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def _anchors(page: Path) -> set[str]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {_slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(_ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.is_file() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def _published_tables(tmp_path: Path) -> dict[str, str]:
    tables = bytes_benchmark.documentation(PUBLISHED, tmp_path / "frontier.svg")
    for path in definition.shipped():
        experiment = definition.load(path)
        with published_results([experiment]) as results:
            tables[experiment.name] = markdown_table(experiment, results)
    return tables


def test_tables_of_results_are_the_published_ones(tmp_path: Path) -> None:
    tables = _published_tables(tmp_path)
    asked = [
        name for page in _PAGES for name in re.findall(r"(?m)^<!-- published: (\S+) -->$", page.read_text("utf-8"))
    ]
    assert {"bytes", "bytes-short"} <= set(asked) <= tables.keys()
    for page in _PAGES:
        text = page.read_text(encoding="utf-8")
        assert published_docs.filled(text, tables) == text, f"{page.name}: publish again"
    assert (tmp_path / "frontier.svg").read_text() == bytes_benchmark.POSTER.read_text(), "publish again"


def test_drawings_of_results_are_the_published_ones_and_are_shown() -> None:
    drawn = 0
    for path in definition.shipped():
        experiment = definition.load(path)
        picture = published_docs.DOCS / f"{experiment.name}.svg"
        with published_results([experiment]) as results:
            text = drawing(experiment, results)
        assert picture.exists() == (text is not None), f"{experiment.name}: publish again"
        if text is not None:
            drawn += 1
            assert picture.read_text(encoding="utf-8") == text, f"{experiment.name}: publish again"
            assert f"]({picture.name})" in (published_docs.DOCS / "experiments.md").read_text(encoding="utf-8")
    assert drawn


def test_a_table_that_was_changed_by_hand_is_noticed() -> None:
    text = "before\n<!-- published: one -->\n\n| a |\n\n<!-- end of published -->\n<!-- published: two -->\n<!-- end of"
    assert published_docs.filled(text, {"one": "| a |\n"}) == text
    assert published_docs.filled(text.replace("| a |", "| b |"), {"one": "| a |\n", "two": "x"}) == text


def test_every_page_is_in_the_index() -> None:
    index = set(_LINK.findall((_ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in (_ROOT / "docs").glob("*.md")} - {"README.md"} <= index


@pytest.mark.parametrize("picture", sorted((_ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_self_contained_and_have_words(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    assert "<title" in text and "<desc" in text and "prefers-color-scheme:dark" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|<image|@import|url\(", text)
