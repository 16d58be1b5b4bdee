"""Run logs as a server writes them, small and made up: for tests of reports."""

from pathlib import Path
from typing import Any

from server.runlog import RunLog


def start_event(**changes: Any) -> dict[str, Any]:
    config = {"name": "cooling", "rounds": 4, "delta": 1e-5, "final-density": 0.3, "private": True}
    return {
        "name": "cooling",
        "version": "0.1.0",
        "time": 1_700_000_000.0,
        "config": config | changes.pop("config", {}),
        "parameters": 1000,
        "private": True,
        "noise_multiplier": 1.127,
        "value_coding": "calibrated",
        "grid_entropy_bits": 3.06,
        "accountant": "rdp",
        "privacy_unit": "record",
        "neighbours": "add or remove one record",
        "sites": 2,
        "declared_sizes": [["a", 120], ["b", 40]],
        "seeded_noise": False,
        "planned_epsilon": 7.0,
        "initial_accuracy": 0.1,
        "initial_loss": 2.3,
    } | changes


def round_event(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "round": number,
        "epoch": number - 1,
        "density": 0.5,
        "kept": 500,
        "cohort": ["a", "b"],
        "admitted": 2,
        "rejections": [],
        "abandoned": False,
        "accuracy": 0.5 + number / 100,
        "loss": 1.0,
        "epsilon": 1.5 * number,
        "uplink": {"index": 100, "values": 4000, "header": 40, "framing": 60},
        "downlink": {"index": 0, "values": 8000, "header": 40, "framing": 60},
        "dense_uplink": 8400,
        "dense_downlink": 8000,
        "bits_per_value": 3.1,
        "bits_per_parameter": 2.05,
        "sites": [[name, 50, 2000, 20, 30, 0, 4000, 20, 30] for name in ("a", "b")],
        "seconds": 2.5,
    } | changes


def end_event(rounds: int, **changes: Any) -> dict[str, Any]:
    site = {"epsilon": 6.0, "uplink": 2100 * rounds, "downlink": 4050 * rounds, "admitted": rounds, "rejected": 0}
    return {
        "rounds": rounds,
        "accuracy": 0.774,
        "loss": 0.6,
        "epsilon": 6.0,
        "uplink": 4200 * rounds,
        "downlink": 8100 * rounds,
        "dense_uplink": 8400 * rounds,
        "dense_downlink": 8000 * rounds,
        "uplink_saving": 2.0,
        "total_density": 0.5,
        "seconds": 10.0,
        "sites": [{"site": name, **site} for name in ("a", "b")],
    } | changes


def write_log(
    folder: Path, start: dict[str, Any] | None, rounds: list[dict[str, Any]], end: dict[str, Any] | None
) -> Path:
    log = RunLog(folder / "run.jsonl")
    if start is not None:
        log.write("run", **start)
    for one in rounds:
        log.write("round", **one)
    if end is not None:
        log.write("end", **end)
    log.close()
    return folder


def finished_run(folder: Path, rounds: int = 4, **changes: Any) -> Path:
    return write_log(
        folder, start_event(**changes), [round_event(number) for number in range(1, rounds + 1)], end_event(rounds)
    )


def public_run(folder: Path) -> Path:
    start = start_event(
        name="open", private=False, planned_epsilon=None, noise_multiplier=0.0, config={"private": False}
    )
    end = end_event(4, epsilon=None)
    end["sites"] = [site | {"epsilon": None} for site in end["sites"]]
    return write_log(folder, start, [round_event(number, epsilon=None) for number in range(1, 5)], end)
