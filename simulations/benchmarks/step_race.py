"""One cell of the step benchmark: all methods of a model, batch size and density, checked and then timed in turns."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from common.errors import FedsieveError
from simulations.benchmarks.step_methods import Step, Task
from simulations.benchmarks.step_models import Model, random_mask, size_of, typical_norm
from simulations.benchmarks.step_peers import METHODS, OURS, PEERS, PLAIN, PLAIN_NCHW

_TURNS = 7
_MOST_TURNS = 60
_CELL_SECONDS = 5.0  # cells whose steps are short take more turns, for about so long
# A peer this much slower than the fastest takes fewer turns if its steps are long: its rank is beyond doubt.
_SLOW_FACTOR = 1.25
_SLOW_TURNS = ((5.0, 1), (0.3, 3))  # seconds of a step, turns; the first that applies
_WARM_SECONDS = 2.0  # a step this long is warm after the check
_TRIAL_STEPS, _TRIAL_BATCH = 3, 256
_MOST_BYTES = 6e9
_TOLERANCE = 1e-3  # of a clipped sum against ours, relative: single precision stays far below it
_RATE = 1e-4  # small: the weights must not run away while the clock runs

Say = Callable[[str], None]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured: the seconds of each method's steps, turn by turn, or why there are none."""

    model: str
    batch: int
    density: float
    layouts: Mapping[str, str]
    seconds: Mapping[str, list[float]]
    missing: Mapping[str, str]

    def ratio(self, method: str, other: str = PLAIN) -> float:
        """Return the median, over the turns that both took, of one method's time over the other's."""
        pairs = zip(self.seconds[method], self.seconds[other], strict=False)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    @property
    def best_peer(self) -> str:
        """The fastest of the private peers that ran."""
        ran = [peer for peer in PEERS if peer in self.seconds]
        if not ran:
            raise FedsieveError(f"no peer could run {self.model} at batch {self.batch}: nothing to compare with")
        return min(ran, key=self.ratio)


class Race:
    """The cells of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._size = size_of(model.network())
        self._layouts: dict[tuple[str, int], str] = {}  # of each method at each batch size, once it is known

    def run(self, batch: int, density: float, say: Say) -> Cell:
        """Check every method's clipped sum against ours, then let them take turns; ``say`` is told of progress."""
        model = self._model
        say("making the batch")
        data = model.batch(batch)
        mask = random_mask(self._size, density)
        task = Task(model, mask, typical_norm(model.network(), *data, mask), _RATE / batch)
        steps, first, missing = self._checked(task, data, say)
        seconds = _take_turns(steps, first, data, say)
        layouts = {name: self._layout(name, task, data) for name in steps}
        return Cell(model.name, batch, density, layouts, seconds, missing)

    def _checked(self, task: Task, data: Batch, say: Say) -> tuple[dict[str, Step], dict[str, float], dict[str, str]]:
        """Return the methods that can run, how long the check took, and why others cannot; raise if a sum is wrong."""
        steps: dict[str, Step] = {}
        first: dict[str, float] = {}
        missing: dict[str, str] = {}
        dense = METHODS[OURS].build(replace(task, mask=None), "").total(*data)
        masked = METHODS[OURS].build(task, "").total(*data)
        for name, method in METHODS.items():
            if name == PLAIN_NCHW and not task.model.pictures:
                continue
            say(f"checking {name}")
            needed = 4 * self._size * len(data[0])
            if method.writes and needed > _MOST_BYTES:
                missing[name] = f"needs {needed / 1e9:.1f} GB"
                continue
            try:
                step = method.build(task, self._layout(name, task, data))
                start = time.process_time()
                total = step.total(*data)
                first[name] = time.process_time() - start
            except Exception as error:  # whatever a peer stumbles over is said in the table
                if name not in PEERS:
                    raise
                missing[name] = _reason(error)
                continue
            steps[name] = step
            wanted = masked if method.masks else dense
            off = float((total - wanted).norm() / wanted.norm())
            if name in PEERS and not off < _TOLERANCE:
                raise FedsieveError(
                    f"{name} computes another clipped sum than we do at {task.model.name}, batch {len(data[0])}: "
                    f"expected a relative difference below {_TOLERANCE}, got {off:.2g}"
                )
        return steps, first, missing

    def _layout(self, name: str, task: Task, data: Batch) -> str:
        """Return the memory layout that a method runs in: the faster one in a trial, at most on a batch of 256."""
        choices = METHODS[name].layouts if self._model.pictures else METHODS[name].layouts[:1]
        key = name, min(len(data[0]), _TRIAL_BATCH)
        if key not in self._layouts:
            self._layouts[key] = choices[0]
            if len(choices) > 1:
                few = data[0][:_TRIAL_BATCH], data[1][:_TRIAL_BATCH]
                tried = {layout: METHODS[name].build(task, layout) for layout in choices}
                turns = [{layout: _timed(step, few) for layout, step in tried.items()} for _ in range(1 + _TRIAL_STEPS)]
                self._layouts[key] = min(choices, key=lambda layout: min(turn[layout] for turn in turns[1:]))
        return self._layouts[key]


def _take_turns(steps: dict[str, Step], first: dict[str, float], data: Batch, say: Say) -> dict[str, list[float]]:
    """Return the times of the steps of every method, in turns whose order changes; ``first`` are those of the check."""
    say("warming up")
    first = {name: t if t > _WARM_SECONDS else _timed(steps[name], data) for name, t in first.items()}
    fastest = min((first[peer] for peer in PEERS if peer in first), default=0.0)
    turns = min(_MOST_TURNS, max(_TURNS, round(_CELL_SECONDS / sum(first.values()))))
    allowed = dict.fromkeys(steps, turns)
    for peer in first.keys() & set(PEERS):
        if first[peer] > _SLOW_FACTOR * fastest:
            allowed[peer] = next((few for seconds, few in _SLOW_TURNS if first[peer] > seconds), turns)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(1)
    gc.collect()
    gc.disable()
    for turn in range(turns):
        say(f"turn {turn + 1} of {turns}")
        running = [name for name in steps if turn < allowed[name]]
        for name in order.sample(running, len(running)):
            times[name].append(_timed(steps[name], data))
    gc.enable()
    return times


def _timed(step: Step, data: Batch) -> float:
    """Return the CPU time of a step: with one thread, the time that it takes on a machine with nothing else to do."""
    start = time.process_time()
    step(*data)
    return time.process_time() - start


def _reason(error: Exception) -> str:
    """Return in a few words why a method cannot run."""
    if isinstance(error, ImportError):
        return "not installed"
    text = str(error)
    if "allocate memory" in text or isinstance(error, MemoryError):
        return "out of memory"
    return (text.splitlines() or [type(error).__name__])[0][:60]
