"""Carrying out the runs of the communication benchmark, one after the other, each on all cores."""

from collections.abc import Sequence
from contextlib import nullcontext

from rich.console import Console

from server.runlog import Event
from simulations import many_runs
from simulations.benchmarks.bytes_plan import PlannedRun
from simulations.many_runs import Clock, Display, config_to_start, ray_kept_up, work_of
from simulations.report import words
from simulations.report.summary import RunSummary, load_run
from simulations.run import Engine, simulate


def finished(run: PlannedRun) -> RunSummary | None:
    """Return the summary of a run that has ended and had the config that is wanted now."""
    return many_runs.finished(run.config)


def carry_out(runs: Sequence[PlannedRun], engine: Engine, console: Console) -> None:
    """Do what is not done yet, with a bar on a terminal and with lines elsewhere."""
    found = [(run, finished(run)) for run in runs]
    missing = [run for run, summary in found if summary is None]
    earlier = [(work_of(run.config), summary.seconds) for run, summary in found if summary is not None]
    if earlier:
        console.print(f"{len(earlier)} of {len(runs)} runs were done already", highlight=False)
    if not missing:
        return
    clock = Clock({run.config.name: work_of(run.config) for run in missing}, earlier)
    up = nullcontext() if engine.in_process else ray_kept_up(engine.ray_address)
    with up, Display(len(runs), len(earlier), console) as display:
        for run in missing:
            name = run.config.name
            display.start(name, run.title, clock.left())
            clock.start(name)

            def follow(event: Event, run: PlannedRun = run, name: str = name) -> None:
                if event["event"] == "round":
                    share = event["round"] / run.config.rounds
                    clock.advance(name, share)
                    display.advance(name, share, clock.left())

            simulate(config_to_start(run.config), engine, (follow,))
            display.end(name, _figures(load_run(run.folder), clock.end(name)))


def _figures(summary: RunSummary, seconds: float) -> str:
    figures = f"accuracy {words.percent(summary.accuracy)}, uplink {words.in_bytes(summary.uplink)}"
    return f"{figures}, downlink {words.in_bytes(summary.downlink)}, {words.duration(seconds)}"
