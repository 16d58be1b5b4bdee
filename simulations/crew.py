"""Many pieces of work at a time, on Ray or here one after the other, with progress and the time that is left."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from client.memory import keep_freed_memory
from common.errors import FedsieveError
from simulations.many_runs import Clock, Display, ray_kept_up

Progress = Callable[[float], None]
"""Is told which share of a piece is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Where pieces are carried out; changes no result. ``jobs`` at a time, 0: one for each CPU of the Ray cluster."""

    jobs: int = 0
    ray_address: str | None = None
    in_process: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """``function(*arguments, progress)``, a function of a module so that a worker finds it; ``work`` is its size."""

    name: str
    work: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def carry_out(
    pieces: Sequence[Piece],
    earlier: Sequence[tuple[float, float]],
    workers: Workers,
    console: Console,
    keep: Callable[[str, Any, float], str],
    *,
    noun: str = "runs",
) -> list[str]:
    """Carry out all pieces; one that fails does not stop the others. Returns what failed, and why.

    ``earlier`` has (work, seconds) of the pieces that were done before. ``keep`` takes the name, the result and the
    seconds of a piece as soon as it is done, and says in words what came of it.
    """
    total = len(pieces) + len(earlier)
    if earlier:
        console.print(f"{len(earlier)} of {total} {noun} were done already", highlight=False)
    if not pieces:
        return []
    failures = []
    with _Here() if workers.in_process else _OnRay(workers) as crew:
        clock = Clock({piece.name: piece.work for piece in pieces}, earlier, crew.jobs)
        with Display(total, len(earlier), console) as display:
            for piece, result in crew.results(pieces, _Watch(clock, display)):
                seconds = clock.end(piece.name)
                if isinstance(result, Exception):
                    why = str(result) if isinstance(result, FedsieveError) else f"{type(result).__name__}: {result}"
                    failures.append(f"{piece.name}: {why}")
                    display.end(piece.name, f"FAILED: {why}")
                else:
                    display.end(piece.name, keep(piece.name, result, seconds))
    return failures


@dataclass(slots=True)
class _Watch:
    """Tells clock and display what begins and how far it is."""

    clock: Clock
    display: Display

    def start(self, name: str) -> None:
        self.clock.start(name)
        self.display.start(name, self.clock.left())

    def advance(self, name: str, share: float) -> None:
        self.clock.advance(name, share)
        self.display.advance(name, share, self.clock.left())


Outcome = tuple[Piece, Any]
"""A piece and its result, or the exception that ended it."""


class _Here:
    """Carries out pieces in this process, one after the other."""

    jobs = 1

    def __enter__(self) -> "_Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def results(self, pieces: Sequence[Piece], watch: _Watch) -> Iterator[Outcome]:
        for piece in pieces:
            watch.start(piece.name)

            def progress(share: float, name: str = piece.name) -> None:
                watch.advance(name, share)

            try:
                result = piece.function(*piece.arguments, progress)
            except Exception as error:  # whatever ends a piece does not stop the others, as on Ray
                result = error
            yield piece, result


class _OnRay:
    """Carries out pieces on a Ray cluster, one CPU each."""

    jobs: int

    def __init__(self, workers: Workers) -> None:
        self._up = ray_kept_up(workers.ray_address)
        self._wanted = workers.jobs

    def __enter__(self) -> "_OnRay":
        self._up.__enter__()
        import ray

        self.jobs = self._wanted or max(1, int(ray.cluster_resources().get("CPU", 1)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._up.__exit__(*error)

    def results(self, pieces: Sequence[Piece], watch: _Watch) -> Iterator[Outcome]:
        import ray

        board = ray.remote(num_cpus=0)(_Board).remote()
        # A FedsieveError is an answer; a worker that dies is tried again, and goes on where it was.
        remote = ray.remote(num_cpus=1, max_retries=2)(_carry_out_remotely)
        waiting, running = list(pieces), {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                piece = waiting.pop(0)
                watch.start(piece.name)
                running[remote.remote(piece.name, piece.function, piece.arguments, board)] = piece
            ready, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            for name, share in ray.get(board.take.remote()).items():
                if any(piece.name == name for piece in running.values()):
                    watch.advance(name, share)
            for reference in ready:
                piece = running.pop(reference)
                try:
                    yield piece, ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    yield piece, error.cause  # its own words alone, not the worker's stack
                except ray.exceptions.RayError as error:
                    yield piece, error


class _Board:
    """Where workers on Ray write how far they are."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    def put(self, name: str, share: float) -> None:
        self._shares[name] = share

    def take(self) -> dict[str, float]:
        shares, self._shares = self._shares, {}
        return shares


def _carry_out_remotely(name: str, function: Callable[..., Any], arguments: tuple[Any, ...], board: Any) -> Any:
    keep_freed_memory()
    said = 0.0

    def progress(share: float) -> None:
        nonlocal said
        if time.monotonic() - said > 0.5:  # rounds may be far shorter than that
            said = time.monotonic()
            board.put.remote(name, share)

    return function(*arguments, progress)
