"""What a SuperLink counts, line by line, for a run whose log is written here; a real one is in test_deployment.py."""

from common.coding import PartBytes
from deployment.counters import Line, compare
from deployment.superlink import RunStatus
from server.runlog import Event

DOWN = {"index": 10, "values": 20, "header": 30, "framing": 40}
UP = {"index": 1000, "values": 2000, "header": 3000, "framing": 4000}
EVENTS: list[Event] = [
    {"event": "run", "sites": 3, "declared_sizes": [[0, 10], [1, 100], [2, 100_000]]},
    {"event": "round", "cohort": [0, 2]},
    {"event": "stop", "cohort": [0]},
    {"event": "round", "cohort": [0, 1, 2]},
    {"event": "end", "downlink": DOWN, "uplink": UP},
]
STATUS = RunStatus(1, "finished", "completed", "", "", bytes_sent=9000, bytes_received=16000)


def test_every_byte_has_its_line() -> None:
    """The envelopes are as long as those of Flower 1.41: 640 and 434 bytes a plan, 571 and 434 an introduction."""
    comparison = compare(EVENTS, STATUS)
    assert comparison.lines == (
        Line("rounds, as Fedsieve counts them", PartBytes(**DOWN).total, PartBytes(**UP).total),
        Line("envelopes of 5 plans and their replies", 5 * 640, 5 * 434),
        Line("3 sites introduce themselves", 3 * 146, 423 + 424 + 425),  # a number takes one to three bytes here
        Line("envelopes of that", 3 * 571, 3 * 434),
    )
    assert comparison.link == Line("the SuperLink's counters", 9000, 16000)
    assert comparison.ratio == (100 + 3200 + 438 + 1713 + 10000 + 2170 + 1272 + 1302) / 25000
    assert comparison.ratio_without_envelopes == (100 + 10000) / 25000
    assert comparison.table().splitlines() == [
        "bytes                                              to sites   from sites",
        "rounds, as Fedsieve counts them                         100        10000",
        "envelopes of 5 plans and their replies                 3200         2170",
        "3 sites introduce themselves                            438         1272",
        "envelopes of that                                      1713         1302",
        "together                                               5451        14744",
        "the SuperLink's counters                               9000        16000",
    ]


def test_sizes_that_the_log_does_not_tell_are_about_as_long() -> None:
    comparison = compare([{**EVENTS[0], "declared_sizes": []}, *EVENTS[1:]], STATUS)
    assert comparison.lines[2:] == (
        Line("3 sites introduce themselves", 3 * 146, 3 * 423),
        Line("envelopes of that", 3 * 571, 3 * 434),
    )
