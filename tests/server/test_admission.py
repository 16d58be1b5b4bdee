from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from common import coding
from common.coding import SparseUpdate
from common.records import Refusal, Release
from server.admission import AdmittedUpdate, Rejection, admit
from tests.support import small_plan

PLAN = small_plan(100, round=5, model_version=4)
GOOD = SparseUpdate(5, 4, PLAN.mask.digest(), 100, np.linspace(-1, 1, 50, dtype=np.float32))


def reply_with(content: RecordDict | Error) -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    return Message(content, reply_to=Message(RecordDict(), 2, "train"))  # type: ignore[arg-type]


def verdict_on(update: SparseUpdate | bytes, value_coding: str = "f32") -> AdmittedUpdate | Rejection:
    data = update if isinstance(update, bytes) else coding.encode(update, value_coding)  # type: ignore[arg-type]
    return admit(reply_with(Release(data).to_content()), PLAN, 10)


def test_a_good_update_is_admitted_as_it_is() -> None:
    verdict = verdict_on(GOOD)
    assert isinstance(verdict, AdmittedUpdate)
    assert (verdict.values == GOOD.values).all()
    assert verdict.parts.values == 200 and verdict.parts.index == 0


def with_value(value: float) -> SparseUpdate:
    values = GOOD.values.copy()
    values[7] = value
    return replace(GOOD, values=values)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (with_value(float("nan")), "not finite"),
        (with_value(float("-inf")), "not finite"),
        (replace(GOOD, round=4), "expected an answer to round 5, got one to round 4"),
        (replace(GOOD, model_version=3), "expected model version 4, got 3"),
        (replace(GOOD, mask_digest=1), "another mask"),
        (replace(GOOD, values=GOOD.values[:49]), "expected 50 values, got 49"),
        (replace(GOOD, values=np.zeros(51, np.float32)), "expected at most 240 bytes, got 244"),
        (replace(GOOD, values=np.zeros(500, np.float32)), "at most 240 bytes"),
        (replace(GOOD, size=101), "100 parameters, got 101"),
        (coding.encode(GOOD, "f32")[:-1], "expected 240 bytes in all, got 239"),
        (b"", "at least 40 bytes, got 0"),
        (np.random.default_rng(1).bytes(240), "start with"),
        (coding.encode(GOOD, "f32")[:-1] + b"\x01", "checksum"),
    ],
)
def test_bad_updates_are_rejected_with_the_reason(update: SparseUpdate | bytes, reason: str) -> None:
    verdict = verdict_on(update)
    assert isinstance(verdict, Rejection)
    assert reason in verdict.reason
    assert verdict.spent


def test_another_value_coding_than_asked_is_rejected() -> None:
    verdict = verdict_on(GOOD, "f16")
    assert isinstance(verdict, Rejection) and "coded as f32, got f16" in verdict.reason


def test_refusals_and_failures() -> None:
    refusal = admit(reply_with(Refusal("over my budget").to_content()), PLAN, 10)
    assert refusal == Rejection("refused: over my budget", spent=False)
    failure = admit(reply_with(Error(1, "Traceback\nValueError: boom")), PLAN, 10)
    assert failure == Rejection("the site failed: ValueError: boom")


def test_content_of_another_kind() -> None:
    content = RecordDict({"arrays": ArrayRecord({"a": Array(np.zeros(3))})})
    assert isinstance(admit(reply_with(content), PLAN, 10), Rejection)
    assert isinstance(admit(reply_with(RecordDict()), PLAN, 10), Rejection)
