import numpy as np
import pytest

from client.randomness import OsRandomness
from client.site import Site, Workbench
from common import coding
from common.errors import ConfigError, PlanRefused, WireError
from common.models import initial_vector
from simulations.seeded import SeededRandomness
from tests.support import SMALL_MODEL, site_data, small_dataset, small_plan, small_request

DATA = small_dataset()
START = initial_vector(SMALL_MODEL, 3)


def site_with(randomness: object) -> Site:
    return Site(site_data(DATA.train_inputs, DATA.train_targets), randomness, Workbench("cpu"))  # type: ignore[arg-type]


def test_a_release_is_what_the_plan_asked_for_and_nothing_else() -> None:
    plan = small_plan(START.size, round=4, model_version=3)
    data = site_with(OsRandomness()).train(*small_request(START, round=4, model_version=3))
    assert len(data) == coding.HEADER_BYTES + 4 * plan.mask.kept
    update = coding.decode(data, size=START.size, max_kept=plan.mask.kept, value_coding="f32")
    assert (update.round, update.model_version, update.mask_digest) == (4, 3, plan.mask.digest())
    assert np.isfinite(update.values).all()


def test_seeded_sites_repeat_themselves_and_others_do_not() -> None:
    plan, model = small_request(START)
    again = [site_with(SeededRandomness(1, 0)).train(plan, model) for _ in range(2)]
    assert again[0] == again[1]
    assert site_with(SeededRandomness(1, 1)).train(plan, model) != again[0]
    assert site_with(SeededRandomness(2, 0)).train(plan, model) != again[0]
    fresh = site_with(OsRandomness())
    assert fresh.train(plan, model) != fresh.train(plan, model)


def test_seeded_randomness_does_not_depend_on_the_runs_name() -> None:
    a, b = (site_with(SeededRandomness(1, 0)).train(*small_request(START, run=run)) for run in "ab")
    assert a == b


def test_a_plan_for_another_model_is_refused() -> None:
    plan = small_plan(START.size + 1)
    with pytest.raises(PlanRefused, match=f"{START.size + 1} parameters"):
        site_with(OsRandomness()).train(plan.to_bytes(), small_request(START)[1])


def test_bytes_that_are_no_plan_or_no_model() -> None:
    site = site_with(OsRandomness())
    with pytest.raises(WireError):
        site.train(b"junk", small_request(START)[1])
    with pytest.raises(WireError):
        site.train(small_request(START)[0], b"junk")
    with pytest.raises(WireError, match="expected the model"):
        site.train(small_request(START + 1)[0], small_request(START)[1])


def test_devices() -> None:
    assert Workbench("auto").model(SMALL_MODEL).vector.device.type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="got 'abacus'"):
        Workbench("abacus")
