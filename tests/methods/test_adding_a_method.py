"""Adding a method is one file, one registry line and one row: a trivial one, added here, passes the whole suite."""

from pathlib import Path

import pytest

from common.config import RunConfig
from common.methods import METHODS
from common.methods.method import Method
from common.schedule import DensitySchedule
from tests.methods import test_conformance as suite


# The file: common/methods/half.py would hold this class and METHOD = Half().
class Half(Method):
    """Random sparsification that always keeps half of the coordinates."""

    name = "half"
    title = "half of the coordinates, at random, in every epoch"
    paper = "none: an example for CONTRIBUTING.md"
    about = (
        "A method that differs from random in its density alone; mechanism, masks and accounting are those of random."
    )

    def schedule(self, config: RunConfig) -> DensitySchedule:
        """Return density 1/2 for every epoch."""
        return DensitySchedule("constant", 0.5, 1, config.rounds_per_epoch)


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "half", Half())  # the line in common/methods/__init__.py
    monkeypatch.setitem(suite.ROWS, "half", suite.Row())  # the row in test_conformance.py


def test_the_trivial_method_passes_every_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.test_every_registered_method_has_a_row()
    suite.test_sensitivity("half", 1e3)
    suite.test_noise_on_what_is_kept("half")
    suite.test_ledger("half", tmp_path)
    suite.test_coding_round_trip("half")
    suite.test_what_all_rounds_cost_is_what_was_planned("half", tmp_path / "cost")
    suite.test_resume("half", tmp_path / "resume")
    suite.test_byte_counters("half", tmp_path / "bytes", monkeypatch)
    suite.test_audit("half")
    assert suite.config_of("half", final_density=0.1).schedule.density(3) == 0.5


def test_a_method_without_a_row_fails_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(suite.ROWS, "half")
    with pytest.raises(AssertionError):
        suite.test_every_registered_method_has_a_row()
