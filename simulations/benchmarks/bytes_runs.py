"""Carrying out the runs of the communication benchmark, one after the other, each on all cores."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from rich.console import Console

from common.coding import PartBytes, largest_index_bytes
from server.runlog import Event
from simulations import many_runs
from simulations.benchmarks.bytes_plan import PlannedRun
from simulations.many_runs import Clock, Display, config_to_start, ray_kept_up, work_of
from simulations.report import words
from simulations.report.summary import RunSummary, load_run
from simulations.run import Engine, simulate


def finished(run: PlannedRun) -> RunSummary | None:
    """Return the summary of a run that has ended and had the config that is wanted now.

    A run that differs from another one in nothing but indices that travel too is that one and the bytes of the indices.
    """
    own = many_runs.finished(run.config)
    if own is not None or run.without_indices is None:
        return own
    other = many_runs.finished(run.without_indices)
    return None if other is None else _with_indices(other)


def _with_indices(summary: RunSummary) -> RunSummary:
    """Return a summary as if every update had named its coordinates, in 4 bytes each."""
    rounds = tuple(
        replace(one, uplink=one.uplink + PartBytes(index=one.admitted * largest_index_bytes("raw", 0, one.kept)))
        for one in summary.rounds
    )
    return replace(summary, rounds=rounds, uplink=sum(one.uplink.total for one in rounds))


def carry_out(runs: Sequence[PlannedRun], engine: Engine, console: Console) -> None:
    """Do what is not done yet, with a bar on a terminal and with lines elsewhere."""
    names = {run.config.name for run in runs}
    trained = [run for run in runs if run.without_indices is None or run.without_indices.name not in names]
    found = [(run, finished(run)) for run in trained]
    missing = [run for run, summary in found if summary is None]
    earlier = [(work_of(run.config), summary.seconds) for run, summary in found if summary is not None]
    if earlier:
        console.print(f"{len(earlier)} of {len(trained)} trainings were done already", highlight=False)
    if not missing:
        return
    clock = Clock({run.config.name: work_of(run.config) for run in missing}, earlier)
    up = nullcontext() if engine.in_process else ray_kept_up(engine.ray_address)
    with up, Display(len(trained), len(earlier), console) as display:
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
