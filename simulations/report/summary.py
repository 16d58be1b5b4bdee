"""From the run log to ``RunSummary``: parsed and checked once; the rest of the package sees nothing but the summary."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.coding import PartBytes
from common.errors import RunFolderError
from server.runfolder import RunFolder
from server.runlog import Event, read_events

NOT_PRIVATE = "not private"
AUDIT_NAME = "audit.json"


@dataclass(frozen=True, slots=True)
class Rejection:
    """One reply that the server did not use."""

    site: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """One round; accuracy is None where not evaluated, epsilon is None where nothing is private."""

    number: int
    epoch: int
    density: float
    kept: int
    asked: int
    admitted: int
    rejections: tuple[Rejection, ...]
    abandoned: bool
    accuracy: float | None
    loss: float | None
    epsilon: float | None
    uplink: PartBytes
    downlink: PartBytes
    dense_uplink: int
    dense_downlink: int
    bits_per_value: float | None
    bits_per_parameter: float | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSummary:
    """What the run has cost one site; epsilon is None where it is not known or nothing is private."""

    site: str
    epsilon: float | None
    uplink: int
    downlink: int
    admitted: int
    rejected: int
    dropped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSummary:
    """What an attack with canaries on the run's mechanism could prove."""

    lower_bound: float
    claimed_epsilon: float
    canaries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run as far as its log goes; where it has no ``end`` event the totals are those of the rounds so far.

    Logs of older versions have no ``declared_sizes``, and do not tell whether their noise was seeded; where the unit is
    the client no log has the sizes.
    """

    folder: Path
    name: str
    version: str
    started: datetime
    resumed: int
    finished: bool
    config: Mapping[str, str]
    parameters: int
    private: bool
    noise_multiplier: float | None
    value_coding: str
    grid_entropy_bits: float | None
    accountant: str
    privacy_unit: str
    neighbours: str
    sites: int
    declared_sizes: Mapping[str, int]
    seeded_noise: bool | None
    planned_epsilon: float | None
    published_epsilon: float | None
    delta: float | None
    initial_accuracy: float | None
    initial_loss: float | None
    rounds: tuple[RoundSummary, ...]
    accuracy: float | None
    loss: float | None
    epsilon: float | None
    uplink: int
    downlink: int
    dense_uplink: int
    dense_downlink: int
    total_density: float | None
    seconds: float
    site_summaries: tuple[SiteSummary, ...]
    audit: AuditSummary | None

    @property
    def has_loss_alone(self) -> bool:
        """Whether its targets are numbers: they have no accuracy, and the loss speaks."""
        return self.accuracy is None and self.loss is not None

    @property
    def label(self) -> str:
        """The name, never without the warning that it needs."""
        return self.name if self.private else f"{self.name} ({NOT_PRIVATE})"

    @property
    def bits_per_value(self) -> float | None:
        """What a released value cost, on average over the rounds."""
        return _mean([one.bits_per_value for one in self.rounds])

    @property
    def bits_per_parameter(self) -> float | None:
        """What a round's uplink cost per parameter of the model, kept or not, all parts included."""
        return _mean([one.bits_per_parameter for one in self.rounds])

    @property
    def progress(self) -> str:
        """How far the run went, in words."""
        planned = self.config.get("rounds", "?")
        return f"{len(self.rounds)} rounds" if self.finished else f"unfinished, {len(self.rounds)} of {planned} rounds"


def load_run(folder: Path) -> RunSummary:
    """Parse the log of a run folder; a folder without a usable log is a RunFolderError."""
    path = RunFolder(folder).log
    if not path.is_file():
        raise RunFolderError(f"{folder} has no {path.name}: expected the folder of a run, such as runs/<name>")
    start: Event | None = None
    end: Event | None = None
    rounds: list[Event] = []
    resumed = 0
    try:
        for event in read_events(path):
            match event["event"]:
                case "run":
                    start = start or event
                case "resume":
                    resumed, end = resumed + 1, None
                case "round":
                    rounds.append(event)
                case "end":
                    end = event
        if start is None:
            raise RunFolderError(
                f"{path} has no 'run' event: the run never started; start it again or name another folder"
            )
        return _run(folder, start, rounds, end, resumed)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise RunFolderError(
            f"{path} does not follow the schema of the run log ({type(error).__name__}: {error}): restore the file, or "
            "make the report with the version of Fedsieve that wrote it"
        ) from error


def _run(folder: Path, start: Event, round_events: Sequence[Event], end: Event | None, resumed: int) -> RunSummary:
    rounds = tuple(_round(event) for event in round_events)
    totals = _totals(rounds, _number(start["initial_accuracy"])) if end is None else end
    config = {
        str(key): value if isinstance(value, str) else json.dumps(value) for key, value in start["config"].items()
    }
    return RunSummary(
        folder=folder,
        name=str(start["name"]) or folder.name,
        version=str(start["version"]),
        started=datetime.fromtimestamp(float(start["time"]), UTC),
        resumed=resumed,
        finished=end is not None,
        config=config,
        parameters=int(start["parameters"]),
        private=start["private"] is True,  # anything unclear is not private
        noise_multiplier=_number(start["noise_multiplier"]),
        value_coding=str(start["value_coding"]),
        grid_entropy_bits=_number(start["grid_entropy_bits"]),
        accountant=str(start["accountant"]),
        privacy_unit=str(start["privacy_unit"]),
        neighbours=str(start["neighbours"]),
        sites=int(start["sites"]),
        declared_sizes={str(site): int(size) for site, size in start.get("declared_sizes") or ()},
        seeded_noise=None if "seeded_noise" not in start else start["seeded_noise"] is not False,
        planned_epsilon=_number(start["planned_epsilon"]),
        published_epsilon=_number(start.get("published_epsilon")),
        delta=_number(start["config"].get("delta")),
        initial_accuracy=_number(start["initial_accuracy"]),
        initial_loss=_number(start.get("initial_loss")),
        rounds=rounds,
        accuracy=_number(totals["accuracy"]),
        loss=_number(totals.get("loss")),
        epsilon=_number(totals["epsilon"]),
        uplink=_total(totals["uplink"]),
        downlink=_total(totals["downlink"]),
        dense_uplink=int(totals["dense_uplink"]),
        dense_downlink=int(totals["dense_downlink"]),
        total_density=_number(totals["total_density"]),
        seconds=float(totals["seconds"]),
        site_summaries=_sites_so_far(round_events) if end is None else tuple(_site(site) for site in end["sites"]),
        audit=_audit(folder / AUDIT_NAME),
    )


def _totals(rounds: Sequence[RoundSummary], initial_accuracy: float | None) -> Event:
    """Return what the ``end`` event would say if the run had ended here, except for the sites."""
    return {
        "accuracy": next((one.accuracy for one in reversed(rounds) if one.accuracy is not None), initial_accuracy),
        "loss": next((one.loss for one in reversed(rounds) if one.loss is not None), None),
        "epsilon": next((one.epsilon for one in reversed(rounds) if one.epsilon is not None), None),
        "uplink": sum(one.uplink.total for one in rounds),
        "downlink": sum(one.downlink.total for one in rounds),
        "dense_uplink": sum(one.dense_uplink for one in rounds),
        "dense_downlink": sum(one.dense_downlink for one in rounds),
        "total_density": sum(one.density for one in rounds) / len(rounds) if rounds else None,
        "seconds": sum(one.seconds for one in rounds),
    }


def _sites_so_far(rounds: Sequence[Event]) -> tuple[SiteSummary, ...]:
    """Add up what the rounds have cost each site; how much it has spent is known at the end of the run."""
    parts = len(fields(PartBytes))
    totals: dict[str, list[int]] = {}
    for event in rounds:
        rejected = {str(one["site"]) for one in event["rejections"]}
        for site, *sizes in event["sites"]:
            if len(sizes) != 2 * parts:
                raise ValueError(f"expected {2 * parts} sizes for site {site}, got {len(sizes)}")
            refused = str(site) in rejected
            figures = (sum(map(int, sizes[:parts])), sum(map(int, sizes[parts:])), int(not refused), int(refused))
            total = totals.setdefault(str(site), [0, 0, 0, 0])
            for number, figure in enumerate(figures):
                total[number] += figure
    return tuple(
        SiteSummary(site=site, epsilon=None, uplink=up, downlink=down, admitted=admitted, rejected=rejected)
        for site, (up, down, admitted, rejected) in sorted(totals.items(), key=lambda item: (len(item[0]), item[0]))
    )


def _round(event: Event) -> RoundSummary:
    return RoundSummary(
        number=int(event["round"]),
        epoch=int(event["epoch"]),
        density=float(event["density"]),
        kept=int(event["kept"]),
        asked=len(event["cohort"]),
        admitted=int(event["admitted"]),
        rejections=tuple(Rejection(str(one["site"]), str(one["reason"])) for one in event["rejections"]),
        abandoned=bool(event["abandoned"]),
        accuracy=_number(event["accuracy"]),
        loss=_number(event.get("loss")),
        epsilon=_number(event["epsilon"]),
        uplink=_part_bytes(event["uplink"]),
        downlink=_part_bytes(event["downlink"]),
        dense_uplink=int(event["dense_uplink"]),
        dense_downlink=int(event["dense_downlink"]),
        bits_per_value=_number(event["bits_per_value"]),
        bits_per_parameter=_number(event["bits_per_parameter"]),
        seconds=float(event["seconds"]),
    )


def _audit(path: Path) -> AuditSummary | None:
    if not path.is_file():
        return None
    raw = json.loads(path.read_text(encoding="utf-8"))
    return AuditSummary(
        lower_bound=float(raw["lower_bound"]),
        claimed_epsilon=float(raw["claimed_epsilon"]),
        canaries=int(raw["canaries"]),
    )


def _site(raw: Mapping[str, Any]) -> SiteSummary:
    return SiteSummary(
        site=str(raw["site"]),
        epsilon=_number(raw["epsilon"]),
        uplink=_total(raw["uplink"]),
        downlink=_total(raw["downlink"]),
        admitted=int(raw["admitted"]),
        rejected=int(raw["rejected"]),
        dropped=str(raw["dropped"]) if raw.get("dropped") else None,
    )


def _mean(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None


def _part_bytes(raw: Mapping[str, Any]) -> PartBytes:
    return PartBytes(**{part.name: int(raw[part.name]) for part in fields(PartBytes)})


def _total(raw: Any) -> int:
    return _part_bytes(raw).total if isinstance(raw, dict) else int(raw)


def _number(raw: Any) -> float | None:
    """Return null and NaN (a diverged model) as None: both mean that there is no figure."""
    value = None if raw is None else float(raw)
    return None if value is None or math.isnan(value) else value
