"""What a server evaluates, tells Flower's log, and takes up again."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.errors import ModelError
from common.models import FlatModel, build, initial_vector
from server import app
from server.checkpoint import Checkpoint
from server.evaluation import Evaluator
from server.runlog import RunLog
from tests.support import CLASSES, FEATURES, SMALL_MODEL, small_dataset


def test_the_score_is_that_of_the_whole_test_set() -> None:
    rng = np.random.default_rng(5)
    inputs, classes = rng.normal(size=(1203, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, 1203)
    dataset = replace(small_dataset(), test_inputs=inputs, test_targets=classes)
    vector = initial_vector(SMALL_MODEL, 3)
    model = FlatModel(build(SMALL_MODEL))
    model.load(vector)
    outputs, targets = model.module(torch.from_numpy(inputs)).detach(), torch.from_numpy(classes)
    score = Evaluator(SMALL_MODEL, dataset).score(vector)
    assert score is not None
    assert score.accuracy == float((outputs.argmax(1) == targets).double().mean())
    assert score.loss == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, targets)), rel=1e-5)


def test_without_records_to_test_on_there_is_no_score() -> None:
    dataset = small_dataset()
    dataset = replace(dataset, test_inputs=dataset.test_inputs[:0], test_targets=dataset.test_targets[:0])
    assert Evaluator(SMALL_MODEL, dataset).score(initial_vector(SMALL_MODEL, 3)) is None


ROUND = {
    "event": "round",
    "round": 3,
    "accuracy": 0.5,
    "loss": 1.25,
    "epsilon": 2.5,
    "uplink": {"index": 1, "values": 2, "header": 3, "framing": 4},
    "rejections": [{"site": 7, "reason": "no reply"}],
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "round 3: accuracy 50.00%, epsilon 2.500 per record (add or remove one record), uplink 10 bytes"),
        ({"accuracy": None, "epsilon": None}, "round 3: accuracy none, loss 1.25, NOT PRIVATE, uplink 10 bytes"),
        ({"accuracy": None, "loss": None, "epsilon": None}, "round 3: accuracy -, NOT PRIVATE, uplink 10 bytes"),
    ],
)
def test_flowers_log_shows_how_a_run_goes(
    changes: dict[str, object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(app, "flower_log", lambda level, text, *values: lines.append(text % values))
    app._tell_flower({**ROUND, **changes}, "record")
    app._tell_flower({"event": "end", "uplink_saving": 12.345}, "record")
    app._tell_flower({"event": "run"}, "record")
    assert lines == [told, "round 3: site 7 rejected: no reply", "uplink 12.35 times smaller than dense float32"]


@pytest.mark.parametrize(("size", "array"), [(5, "velocity"), (4, "other"), (5, "other")])
def test_a_checkpoint_of_another_model_or_optimizer_is_not_taken_up(tmp_path: Path, size: int, array: str) -> None:
    holder = SimpleNamespace(state={"velocity": np.zeros(4)})
    state = SimpleNamespace(optimizer=holder, average=SimpleNamespace(state={}))
    policy = SimpleNamespace(state={})
    checkpoint = Checkpoint(
        model=np.zeros(size, np.float32),
        run_id="x",
        rounds_done=1,
        model_version=1,
        log_position=0,
        seconds=0.0,
        optimizer={array: np.zeros(size)},
        privacy={},
        traffic={},
    )
    log = RunLog(tmp_path / "run.jsonl")
    with pytest.raises(ModelError, match="the checkpoint is of another model, method or server optimizer"):
        app._restore(state, policy, checkpoint, np.zeros(4, np.float32), log)  # type: ignore[arg-type]
    log.close()
