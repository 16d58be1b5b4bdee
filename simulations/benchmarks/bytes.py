"""What accuracy a number of bytes buys: calibrated sparse DP-SGD against dense updates and plain sparse ones.

``python -m simulations.benchmarks.bytes [--quick | --search | --show | --publish] [--published] [--only WORD ...]``

Every system is a run config, every run an ordinary run folder, every figure from the run logs, which count bytes on
what is serialised. Dense and sparse systems have recipes (rounds, steps, learning rate, ...) of their own from one
list, chosen by hand, or by ``--search`` on a seed that is not reported: bytes_recipes.toml says which. Bytes are those
of all sites and all rounds; savings are ratios of measured bytes. A run that is done is not run again, one that was
stopped goes on; with ``--published`` the runs that come with Fedsieve count as done.
"""

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from common.errors import FedsieveError
from simulations import published_docs
from simulations.benchmarks import bytes_plan
from simulations.benchmarks.bytes_page import HEAD, markdown_tables, rows, write_page, write_poster
from simulations.benchmarks.bytes_plan import PlannedRun, Study
from simulations.benchmarks.bytes_recipes import RECIPES, Recipes
from simulations.benchmarks.bytes_results import Headline, SettingResult, SystemResult, bar, choose_headline, collect
from simulations.benchmarks.bytes_runs import PUBLISHED, Found, RunFigures, carry_out, publish
from simulations.benchmarks.bytes_search import accuracies, best_choices, search_markdown, search_table
from simulations.crew import Workers

_OUT = Path("runs/benchmarks/bytes")
_COMMAND = ("python", "-m", "simulations.benchmarks.bytes")
POSTER = Path(__file__).resolve().parents[2] / "docs" / "frontier.svg"
_SEARCH = "search"  # the folder of its runs


def _done(runs: Sequence[PlannedRun], found: Found) -> list[tuple[PlannedRun, RunFigures]]:
    return [(run, figures) for run in runs if (figures := found.of(run)) is not None]


def _search(study: Study, options: argparse.Namespace, found: Found, workers: Workers, console: Console) -> None:
    recipes = Recipes.load(RECIPES)
    runs = bytes_plan.search_plan(study, recipes, options.out / _SEARCH)
    failures = carry_out(bytes_plan.only(runs, options.only), found, workers, console)
    tried, candidates = accuracies(_done(runs, found)), list(recipes.candidates)
    console.print(search_table(tried, candidates))
    choices = best_choices(tried, candidates)
    recipes.save(choices)
    console.print(f"{len(choices)} choices written to {recipes.path}", highlight=False, soft_wrap=True)
    _raise_if_any(failures)


def _raise_if_any(failures: Sequence[str]) -> None:
    if failures:
        raise FedsieveError("\n".join(["some trainings failed; the same command tries again", *failures]))


@dataclass(frozen=True, slots=True)
class _Findings:
    """What is known of a study so far: ``facts`` say of what, ``sentence`` is the headline in words."""

    facts: str
    done: list[tuple[PlannedRun, RunFigures]]
    results: list[SettingResult]
    headline: Headline | None

    @property
    def sentence(self) -> str:
        return f"{self.headline or 'Nothing to compare yet'}."

    @property
    def figures(self) -> dict[str, str]:
        return bar(self.results, self.headline)

    @property
    def last_line(self) -> str:
        return " ".join(["BAR", *(f"{name}={value}" for name, value in self.figures.items())])

    def write_poster(self, path: Path) -> bool:
        return write_poster(self.results, f"{self.facts}, iid; over all rounds, densities and grids of a family", path)


def _findings(study: Study, runs: Sequence[PlannedRun], found: Found) -> _Findings:
    done = _done(runs, found)  # also what an earlier call with other words left
    results = collect(done)
    facts = f"{study.dataset}, {study.base['model']}, {study.base['sites']} sites, {len(done)} of {len(runs)} runs"
    return _Findings(facts, done, results, choose_headline(results))


def documentation(published: Path, poster: Path) -> dict[str, str]:
    """Return the tables of the published runs, by the names that pages ask for, and draw the poster."""
    study, recipes, found = (
        bytes_plan.full_study(needs_data=False),
        Recipes.load(RECIPES),
        Found(published, folders=False),
    )
    findings = _findings(study, bytes_plan.plan(study, recipes, _OUT), found)
    findings.write_poster(poster)
    last = f"{findings.sentence} From {findings.facts}:\n\n```text\n{findings.last_line}\n```"
    tried = accuracies(_done(bytes_plan.search_plan(study, recipes, _OUT / _SEARCH), found))
    searched = search_markdown(tried, list(recipes.candidates))
    return {**markdown_tables(findings.results, last), "bytes-search": searched}


def _publish(study: Study, options: argparse.Namespace, found: Found, console: Console) -> None:
    recipes = Recipes.load(RECIPES)
    runs = bytes_plan.plan(study, recipes, options.out) + bytes_plan.search_plan(study, recipes, options.out / _SEARCH)
    count = publish(runs, found, PUBLISHED)
    changed = published_docs.write(documentation(PUBLISHED, POSTER))
    pages = ", ".join(page.name for page in changed) or "no page changes"
    console.print(f"{count} trainings written to {PUBLISHED}; tables: {pages}", highlight=False, soft_wrap=True)


def _measure(study: Study, options: argparse.Namespace, found: Found, workers: Workers, console: Console) -> None:
    recipes = None if options.quick else Recipes.load(RECIPES)
    out: Path = options.out / "quick" if options.quick else options.out
    runs = bytes_plan.plan(study, recipes, out)
    wanted = bytes_plan.only(runs, options.only)
    failures = [] if options.show else carry_out(wanted, found, workers, console)
    out.mkdir(parents=True, exist_ok=True)
    findings = _findings(study, runs, found)
    for result in findings.results:
        console.print(_table(result))
    used = {run.recipe: dict(recipes.candidates[run.recipe]) if recipes else {} for run, _ in findings.done}
    report = {
        "dataset": study.dataset,
        **study.base,
        "fedsieve": metadata.version("fedsieve"),
        "processor": platform.processor() or platform.machine(),
        "runs": {"planned": len(runs), "done": len(findings.done)},
        "recipes": used,
        "settings": [_setting_report(result) for result in findings.results],
        "headline": None if findings.headline is None else asdict(findings.headline),
        "bar": findings.figures,
    }
    (out / "bytes.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    facts = f"{findings.facts}. Made from their run logs alone."
    write_page(findings.results, used, findings.sentence, facts, out / "bytes.html")
    written = ["bytes.json", "bytes.html"]
    if findings.write_poster(out / POSTER.name):
        written.append(POSTER.name)
    console.print(f"written to {out}: {', '.join(written)}", highlight=False, soft_wrap=True)
    console.print(findings.sentence, highlight=False, soft_wrap=True)
    print(findings.last_line)
    _raise_if_any(failures)


def _table(result: SettingResult) -> Table:
    # Hardly any padding: the table fits 80 columns.
    table = Table(title=result.setting.title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for number, heading in enumerate(HEAD):
        longest = max(len(word) for word in heading.split())
        table.add_column(heading, justify="right" if number else "left", no_wrap=number < 2, min_width=longest)
    for row, system in zip(rows(result), result.systems.values(), strict=True):
        table.add_row(*row, style="bold" if system.system.family == bytes_plan.OURS else "")
    return table


def _setting_report(result: SettingResult) -> dict[str, Any]:
    return {
        **asdict(result.setting),
        "systems": [_system_report(result, system) for system in result.systems.values()],
        "frontier": {family: [asdict(point) for point in points] for family, points in result.frontiers.items()},
    }


def _system_report(result: SettingResult, system: SystemResult) -> dict[str, Any]:
    reached = result.to_reach(system)
    return {
        **asdict(system),
        "accuracy": system.accuracy,
        "standard_error": system.standard_error,
        "uplink": system.uplink,
        "downlink": system.downlink,
        "uplink_saving": result.uplink_saving(system),
        "total_saving": result.total_saving(system),
        "accuracy_gap": result.gap(system),
        "to_reach": None if reached is None else asdict(reached),
    }


def main(arguments: Sequence[str] | None = None, workers: Workers | None = None) -> int:
    """Run what is missing, print a table for each setting, and end with the BAR line."""
    parser = argparse.ArgumentParser(prog=" ".join(_COMMAND), description=__doc__.splitlines()[0] if __doc__ else None)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="few systems, one seed, shipped data: under five minutes")
    kind.add_argument("--search", action="store_true", help="try every recipe and rewrite the chosen ones")
    kind.add_argument("--show", action="store_true", help="run nothing: show what is done")
    kind.add_argument("--publish", action="store_true", help=f"run nothing: write what is done into {PUBLISHED.name}")
    parser.add_argument("--published", action="store_true", help="count the runs that come with Fedsieve as done")
    parser.add_argument(
        "--out", type=Path, default=_OUT, metavar="FOLDER", help=f"where runs are kept (default {_OUT})"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="run only what has all the words in its title, e.g. iid 'RS 0.3'",
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="trainings at a time (default: one per CPU)")
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    if options.only and (options.show or options.publish):
        parser.error("--only says what to run, and nothing is run with --show and --publish")
    options.out = options.out.resolve()  # workers may have another working directory
    console = Console()
    try:
        # What was published is of all the data, which need not be here to show or to publish it.
        anywhere = options.publish or (options.show and options.published)
        study = bytes_plan.quick_study() if options.quick else bytes_plan.full_study(needs_data=not anywhere)
        console.print(f"data set: {study.dataset}", highlight=False)
        found = Found(PUBLISHED if options.published or options.publish else None)  # what was published stays so
        workers = workers or Workers(jobs=options.jobs)
        if options.search:
            _search(study, options, found, workers, console)
        elif options.publish:
            _publish(study, options, found, console)
        else:
            _measure(study, options, found, workers, console)
    except KeyboardInterrupt:
        console.print(f"stopped; go on with: {shlex.join([*_COMMAND, *words])}", highlight=False, soft_wrap=True)
        return 130
    except FedsieveError as error:
        print(f"bytes benchmark: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
