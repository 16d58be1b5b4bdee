"""The run log: one JSON object a line, the source of every progress line and every report.

Events, in the order in which they appear (all sizes in bytes, all times in seconds):

``run``     first line. name, version, time (Unix), config (every run-config key), parameters (d), private,
            noise_multiplier, value_coding, downlink_coding (as used), grid_entropy_bits (what a value costs that is
            noise alone; null where it is not calibrated to noise of its own), accountant, privacy_unit, neighbours,
            sites (how many joined), declared_sizes (list of [site, its public number of records]; empty where the
            unit is the client), seeded_noise (bool: it comes from the seed, as in simulations), planned_epsilon,
            published_epsilon (what the method's paper would say instead; null where it says the same),
            initial_accuracy, initial_loss (null without a test set)
``resume``  a stopped run went on. round (the first one that is run again or for the first time), time,
            uplink, downlink, dense_uplink (totals of the rounds before)
``round``   round (from 1), epoch (from 0), density, kept, cohort (list of sites asked), admitted (how many),
            rejections (list of {site, reason}), abandoned (bool: too few replies, model unchanged),
            accuracy, loss (null where not evaluated), epsilon (largest over the sites so far; null when not private),
            uplink, downlink ({index, values, header, framing}: what this round cost),
            dense_uplink, dense_downlink (4 bytes per parameter for the same messages),
            bits_per_parameter (of the uplink, all parts, per site asked), bits_per_value (of the value parts admitted),
            sites (list of [site, uplink index, values, header, framing, downlink index, values, header, framing]),
            seconds
``end``     rounds, accuracy, loss, epsilon, uplink, downlink, dense_uplink, dense_downlink (totals), uplink_saving,
            total_saving (both directions), total_density, seconds, sites (list of {site, epsilon, uplink, downlink,
            admitted, rejected, dropped (why it was asked no more, or null)}; uplink and downlink are totals here)
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.errors import RunFolderError

Event = dict[str, Any]
Listener = Callable[[Event], None]


class RunLog:
    """Append-only JSON lines file; every event also goes to the listeners."""

    def __init__(self, path: Path, listeners: tuple[Listener, ...] = ()) -> None:
        self._listeners = listeners
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def write(self, event: str, **fields: Any) -> None:
        """Append one event and hand it to the listeners."""
        record: Event = {"event": event, **fields}
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        for listener in self._listeners:
            listener(record)

    def position(self) -> int:
        """Make everything written so far durable and return the length of the file, for a checkpoint."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def rewind(self, position: int) -> None:
        """Forget what was written after ``position``: rounds that a resumed run will do again."""
        length = self._file.seek(0, os.SEEK_END)
        if position > length:
            raise RunFolderError(
                f"{self._file.name} has {length} bytes but the checkpoint was made at {position}: the log was cut or "
                "replaced; restore it, or start a new run under another name"
            )
        self._file.truncate(position)
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a run log; a half-written last line (a killed server) is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                event = json.loads(line)
            except ValueError as error:
                raise RunFolderError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(event, dict) or "event" not in event:
                raise RunFolderError(f"{path}, line {number}: expected an object with the key 'event'")
            yield event
