"""What a person sees while a simulation runs: a progress bar on a terminal, a line a round elsewhere."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from common.charges import neighbours_of
from common.coding import PartBytes
from common.config import RunConfig
from common.integers import grid_entropy_bits
from server.app import RunResult
from server.runlog import Event
from simulations.report import words


class RunDisplay:
    """Follows the events of a run."""

    def __init__(self, config: RunConfig, console: Console | None = None) -> None:
        self._config = config
        self._console = console or Console()
        self._progress = Progress(
            TextColumn("[bold]round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=8),  # with its text it fits 80 columns
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting ...", total=config.rounds)
        self._uplink = self._downlink = self._dense = 0
        entropy = f"; noise alone {words.bits(grid_entropy_bits(config.grid))} a value"
        self._noise_alone = entropy if config.released_noise_is_coded else ""
        self._folder: Path | None = None
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        """Show one event of the run log."""
        match event["event"]:
            case "run":
                self._folder = Path(self._config.out) / event["name"]
                size = f"{event['sites']} sites, {event['parameters']:,} parameters"
                self._say(f"{event['name']}: {size}, {self._privacy(event)}")
                if event["published_epsilon"] is not None:
                    self._say(f"the paper's own accounting would say epsilon {event['published_epsilon']:.4g}")
                if event["value_coding"] != self._config.value_coding:
                    self._say(f"no noise to calibrate to: values travel as {event['value_coding']}")
            case "resume":
                self._folder = Path(self._config.out) / self._config.run_name
                self._progress.update(self._task, completed=event["round"] - 1)
                self._uplink, self._downlink, self._dense = event["uplink"], event["downlink"], event["dense_uplink"]
                self._say(f"{self._config.run_name}: going on at round {event['round']}")
            case "round":
                self._show_round(event)

    def _show_round(self, event: Event) -> None:
        self._uplink += PartBytes(**event["uplink"]).total
        self._downlink += PartBytes(**event["downlink"]).total
        self._dense += event["dense_uplink"]
        parts = [_score(event["accuracy"], event["loss"])]
        parts.append(
            "[red]not private[/red]" if event["epsilon"] is None else f"epsilon {words.epsilon(event['epsilon'])}"
        )
        parts.append(f"up {words.in_bytes(self._uplink)}, saving {self._dense / max(1, self._uplink):.1f}x")
        line = ", ".join(parts)
        bits = f"{words.bits(event['bits_per_value'])} a value, {words.bits(event['bits_per_parameter'])} a parameter"
        if event["epsilon"] is not None:
            bits = f"per {self._config.privacy_unit}; {bits}"
        sent = f"density {event['density']:.3g}, down {words.in_bytes(self._downlink)}{self._noise_alone}"
        self._progress.update(self._task, completed=event["round"], description=f"{line}\n[dim]{bits}\n{sent}[/dim]")
        if not self._console.is_terminal:
            self._say(f"round {event['round']}/{self._config.rounds}: {line}, {bits}, {sent}")
        for rejection in event["rejections"]:
            reason = escape(rejection["reason"])  # a site's words are no markup
            self._say(f"[yellow]round {event['round']}: site {rejection['site']} rejected: {reason}")
        if event["abandoned"]:
            self._say(f"[red]round {event['round']} abandoned: {event['admitted']} replies, model unchanged")

    def interrupted(self) -> None:
        """Say how an interrupted run goes on."""
        self._progress.stop()
        if self._folder is None:
            self._say("stopped before the first round; nothing was written")
        else:
            self._say(f"stopped; go on with: fedsieve simulate --resume {self._folder}")

    def finished(self, result: RunResult, report: Path) -> None:
        """Print the closing summary and the line for scripts."""
        seconds = time.monotonic() - self._started
        table = Table(show_header=False, box=None, pad_edge=False)
        if result.accuracy is None and result.loss is not None:
            table.add_row("test loss", f"{result.loss:.4g}")
        else:
            accuracy = "not measured" if result.accuracy is None else f"{result.accuracy:.2%}"
            table.add_row("test accuracy", accuracy)
        if result.epsilon is None:
            table.add_row("privacy", f"[red]NOT PRIVATE: {self._config.how.lacks}[/red]")
        else:
            promise = f"epsilon {words.epsilon(result.epsilon)} at delta {self._config.delta:g}"
            unit = self._config.privacy_unit
            table.add_row("privacy", f"{promise}, per {unit} ({neighbours_of(unit)}), for every site")
        table.add_row(
            "uplink", f"{words.in_bytes(self._uplink)}, {words.against_dense(self._uplink, self._dense)} float32"
        )
        table.add_row("both ways", f"{words.saving(result.total_saving)} float32")
        table.add_row("time", f"{seconds:.1f} s")
        table.add_row("run", str(result.folder))
        table.add_row("report", str(report))
        self._console.print(table)
        # Not through rich: scripts read this line, and it must never be wrapped.
        figures = {
            "accuracy": "none" if result.accuracy is None else f"{result.accuracy:.4f}",
            **({"loss": f"{result.loss:.4f}"} if result.accuracy is None and result.loss is not None else {}),
            "epsilon": "none" if result.epsilon is None else f"{result.epsilon:.4f}",
            "uplink_saving": f"{result.uplink_saving:.3f}",
            "seconds": f"{seconds:.1f}",
        }
        print("BAR " + " ".join(f"{name}={value}" for name, value in figures.items()))

    def _privacy(self, event: Event) -> str:
        if not event["private"]:
            return "[red]NOT PRIVATE[/red]"
        budget = f"epsilon {event['planned_epsilon']:g} at delta {self._config.delta:g} per {event['privacy_unit']}"
        return f"{budget} ({event['neighbours']}; noise multiplier {event['noise_multiplier']:.3f})"

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _score(accuracy: float | None, loss: float | None) -> str:
    """Return how the model does: by its accuracy, or, where targets are numbers, by its loss."""
    if accuracy is not None:
        return f"accuracy {accuracy:.2%}"
    return "no accuracy" if loss is None else f"loss {loss:.4g}"
