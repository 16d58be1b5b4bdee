import math
from itertools import pairwise
from typing import Any

import pytest

from common.errors import ConfigError
from common.schedule import DensitySchedule


def test_cooling_goes_from_dense_to_the_final_density() -> None:
    schedule = DensitySchedule("cooling", 0.3, cooling_epochs=20, rounds_per_epoch=1)
    densities = [schedule.density(epoch) for epoch in range(20)]
    assert densities[0] == 1.0
    assert densities[-1] == pytest.approx(0.3)
    assert densities[10] == pytest.approx(1 - 0.7 * 10 / 19)
    assert all(a > b for a, b in pairwise(densities))


def test_after_the_cooling_time_the_density_stays() -> None:
    schedule = DensitySchedule("cooling", 0.1, cooling_epochs=5, rounds_per_epoch=1)
    assert [schedule.density(e) for e in (4, 5, 50)] == [pytest.approx(0.1)] * 3


def test_constant() -> None:
    schedule = DensitySchedule("constant", 0.5, cooling_epochs=5, rounds_per_epoch=1)
    assert {schedule.density(epoch) for epoch in range(10)} == {0.5}


def test_one_epoch_is_at_the_final_density() -> None:
    assert DensitySchedule("cooling", 0.25, 1, 1).density(0) == 0.25


def test_rounds_of_an_epoch_share_it() -> None:
    schedule = DensitySchedule("cooling", 0.3, cooling_epochs=4, rounds_per_epoch=3)
    assert [schedule.epoch(r) for r in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]


def test_kept_is_the_rounded_share() -> None:
    assert DensitySchedule("constant", 0.3, 1, 1).kept(0, 26010) == 7803


LEAST = math.ulp(0.0)


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("final_density", LEAST, 0.0),
        ("final_density", 1.0, math.nextafter(1, 2)),
        ("cooling_epochs", 1, 0),
        ("rounds_per_epoch", 1, 0),
        ("first_density", LEAST, 0.0),
        ("first_density", 0.5, math.nextafter(0.5, 1)),
    ],
)
def test_bad_schedules_are_refused(field: str, inside: float, outside: float) -> None:
    good: dict[str, Any] = {"final_density": 0.5, "cooling_epochs": 2, "rounds_per_epoch": 1, "first_density": LEAST}
    DensitySchedule("unfreezing", **{**good, field: inside})
    with pytest.raises(ConfigError, match="expected"):
        DensitySchedule("unfreezing", **{**good, field: outside})
    if field == "first_density":
        DensitySchedule("cooling", **{**good, field: outside})  # it has none


def test_unfreezing_rises_from_the_first_density_after_a_dense_warm_up() -> None:
    schedule = DensitySchedule("unfreezing", 0.8, 7, 1, first_density=0.2, warmup_epochs=2)
    assert [schedule.density(epoch) for epoch in range(9)] == pytest.approx([1, 1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.8, 0.8])
    assert DensitySchedule("unfreezing", 0.8, 3, 1, first_density=0.2, warmup_epochs=2).density(2) == 0.8
    with pytest.raises(ConfigError, match="first-density <= final-density"):
        DensitySchedule("unfreezing", 0.1, 3, 1, first_density=0.2)
