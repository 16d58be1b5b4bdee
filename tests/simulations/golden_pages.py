"""Report pages of made-up runs as they should be, one element a line: ``python -m tests.simulations.golden_pages``.

The command writes them anew. Look at what git says has changed: that is what readers will see.
"""

import json
import re
import tempfile
from pathlib import Path

from server.runlog import RunLog
from simulations.report import write_report
from tests.run_logs import end_event, public_run, round_event, start_event, write_log

GOLDEN = Path(__file__).parent / "golden"


def cooled(folder: Path) -> Path:
    """Write a private run, simulated and audited, of which a round was abandoned and a site is asked no more."""
    rounds = [
        round_event(number, kept=650 - 50 * number, density=0.65 - 0.05 * number, accuracy=0.1 * number, epsilon=number)
        for number in range(1, 7)
    ]
    rounds[2]["accuracy"] = None
    reason = {"site": "b", "reason": "the site failed: <no memory>"}
    rounds[3] |= {"abandoned": True, "admitted": 1, "rejections": [reason]}
    end = end_event(6)
    end["sites"][1] |= {"epsilon": 4.321, "admitted": 5, "rejected": 1, "dropped": "its budget is used up"}
    start = start_event(seeded_noise=True, published_epsilon=0.25, config={"dataset": "pictures", "model": "net"})
    write_log(folder, start, rounds, end)
    (folder / "audit.json").write_text(json.dumps({"lower_bound": 3.5, "claimed_epsilon": 6.0, "canaries": 5000}))
    return folder


def of_clients(folder: Path) -> Path:
    """Write a run that protects whole sites, drawn in secret, and that was stopped and goes on."""
    config = {"name": "whole sites", "rounds": 9, "delta": 3e-6, "cohort": 3, "clip-norm": 0.5}
    start = start_event(name="whole sites", privacy_unit="client", sites=5, declared_sizes=[], config=config)
    log = RunLog(folder / "run.jsonl")
    log.write("run", **{**start, "neighbours": "add or remove one site with all its records", "accountant": "prv"})
    for number in range(1, 5):
        if number == 3:
            log.write("resume", round=3, time=1_700_000_100.0, uplink=0, downlink=0, dense_uplink=0)
        log.write("round", **round_event(number, epoch=0, cohort=["a", "b", "c"], epsilon=0.25 * number))
    log.close()
    return folder


def of_numbers(folder: Path) -> Path:
    """Write a run whose targets are numbers, with a promise that is none and an upload larger than dense."""
    rounds = [round_event(number, accuracy=None, loss=5.0 / number, epsilon=9.0 * number) for number in range(1, 4)]
    end = end_event(3, accuracy=None, loss=1.5, epsilon=27.0, dense_uplink=9000)
    config = {"name": "numbers", "method": "ranked", "final-density": 0.1}
    start = start_event(name="numbers", initial_accuracy=None, planned_epsilon=30.0, config=config)
    start |= {"value_coding": "f16", "grid_entropy_bits": None}
    return write_log(folder, start, rounds, end)


def pages() -> dict[str, str]:
    """Return every page by its name, without its style, one element a line."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runs = [cooled(folder / "a"), of_clients(folder / "b"), of_numbers(folder / "c"), public_run(folder / "d")]
        found = {}
        shown = {"run": runs[:1], "clients": runs[1:2], "numbers": runs[2:3], "compared": [runs[0], *runs[2:]]}
        for name, folders in shown.items():
            page = write_report(folders, folder / "report.html").read_text(encoding="utf-8")
            page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
            found[name] = re.sub(r"(?<=>)(?=<[a-z!])", "\n", page)
        return found


if __name__ == "__main__":
    for name, page in pages().items():
        (GOLDEN / f"{name}.html").write_text(page, encoding="utf-8")
