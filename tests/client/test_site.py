import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from client.randomness import OsRandomness
from client.site import Site, Workbench
from common import coding
from common.broadcast import digest_of
from common.errors import ConfigError, DatasetError, ModelError, PlanRefused, WireError
from common.models import initial_vector
from common.plan import RoundPlan
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


def test_values_that_single_precision_cannot_carry_are_refused() -> None:
    extreme = {"learning_rate": 1e9, "noise_multiplier": 1e6, "sampling_rate": 1e-9, "clip_norm": 1e9}
    request = small_request(START, value_coding="calibrated", **extreme)
    with pytest.raises(PlanRefused, match="single precision cannot carry"):
        site_with(OsRandomness()).train(*request)


def test_records_that_a_model_cannot_take_are_told_to_the_operator_and_to_nobody_else() -> None:
    site_with(OsRandomness()).require_fit(SMALL_MODEL)
    with pytest.raises(ModelError, match=r"mlp:99-3 does not take records of shape \(12,\)"):
        site_with(OsRandomness()).require_fit("mlp:99-3")
    with pytest.raises(DatasetError, match="expected classes 0 to 1, which mlp:12-2 tells apart, got 0 to 2"):
        site_with(OsRandomness()).require_fit("mlp:12-2")


def test_a_model_that_mixes_records_is_found_out_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixing = """
        import torch
        class Centring(torch.nn.Module):
            def forward(self, outputs):
                return outputs - outputs.mean(0)
        def build():
            return torch.nn.Sequential(torch.nn.Linear(12, 3), Centring())
    """
    (tmp_path / "mixing_model.py").write_text(textwrap.dedent(mixing))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match="depends on the other records"):
        site_with(OsRandomness()).require_fit("mixing_model:build")


def test_a_score_is_that_of_all_records_at_once_and_leaves_the_model_to_train() -> None:
    site = site_with(OsRandomness())
    whole, in_batches = (site.evaluate(*small_request(START, physical_batch_size=size)) for size in (240, 64))
    model = site._workbench.model(SMALL_MODEL)
    assert model.module.training
    with torch.no_grad():
        outputs = model.module(torch.from_numpy(DATA.train_inputs))
        targets = torch.from_numpy(DATA.train_targets)
        loss = float(torch.nn.functional.cross_entropy(outputs, targets))
    assert whole.accuracy == in_batches.accuracy == float((outputs.argmax(1) == targets).double().mean())
    assert whole.loss == pytest.approx(loss, rel=1e-5) and in_batches.loss == pytest.approx(loss, rel=1e-5)
    assert whole.digest == digest_of(START)


def test_the_models_used_last_are_held() -> None:
    shelf = Workbench("cpu").shelf  # of three
    requests = [small_request(START + number) for number in range(4)]
    for plan, model in requests[:3]:
        shelf.received(RoundPlan.from_bytes(plan), model)
    assert shelf.get(digest_of(START)) is not None  # used after the second
    shelf.received(RoundPlan.from_bytes(requests[3][0]), requests[3][1])
    assert [shelf.get(digest_of(START + number)) is not None for number in range(4)] == [True, False, True, True]
    shelf.clear()
    assert shelf.get(digest_of(START)) is None


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_made_up_records_have_the_shape_of_the_sites(kind: type) -> None:
    data = site_data(np.ones((5, 4, 3), np.float32), np.ones((5, 2, 6), kind))
    inputs, targets = data.example(7, torch.device("cpu"))
    assert inputs.shape == (7, 4, 3) and targets.shape == (7, 2, 6)
    assert targets.numpy().dtype == kind and float(inputs.std()) > 0
    with pytest.raises(DatasetError, match="at least 1, got 0"):
        replace(data, declared_size=0)
    assert replace(data, declared_size=1).declared_size == 1


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device 'cuda:1' was asked for, but torch sees no CUDA device"):
        Workbench("cuda:1")
    assert Workbench("cpu").model(SMALL_MODEL).vector.device.type == "cpu"
    monkeypatch.undo()
    assert Workbench("auto").model(SMALL_MODEL).vector.device.type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="got 'abacus'"):
        Workbench("abacus")
