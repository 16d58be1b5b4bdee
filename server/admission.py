"""Admission: every reply becomes an AdmittedUpdate, or a Rejection that says why; none can end the run."""

from dataclasses import dataclass

import numpy as np
from flwr.app import Message

from common import coding
from common.coding import PartBytes, Values
from common.errors import WireError
from common.plan import RoundPlan
from common.records import Refusal, parse_answer


@dataclass(frozen=True, slots=True)
class AdmittedUpdate:
    """The values of one site on the kept coordinates: finite, of the right round, model and mask."""

    values: Values
    parts: PartBytes


@dataclass(frozen=True, slots=True)
class Rejection:
    """A reply that does not count. ``spent`` is false only where the site said that nothing was spent."""

    reason: str
    spent: bool = True


def admit(reply: Message, plan: RoundPlan) -> AdmittedUpdate | Rejection:
    """Check a reply against the plan that it answers."""
    if reply.has_error():
        return Rejection(f"the site failed: {_first_line(reply.error.reason or 'no reason given')}")
    try:
        answer = parse_answer(reply.content)
        if isinstance(answer, Refusal):
            return Rejection(f"refused: {_first_line(answer.reason)}", spent=False)
        return _admit_update(answer.update, plan)
    except WireError as error:
        return Rejection(str(error))


def _admit_update(data: bytes, plan: RoundPlan) -> AdmittedUpdate | Rejection:
    mask = plan.mask
    largest = coding.HEADER_BYTES + coding.value_bytes(plan.value_coding, mask.kept)
    if len(data) > largest:
        return Rejection(f"expected at most {largest} bytes, got {len(data)}")
    update = coding.decode(data, size=mask.size, max_kept=mask.kept, value_coding=plan.value_coding)
    if update.round != plan.round:
        return Rejection(f"expected an answer to round {plan.round}, got one to round {update.round}")
    if update.model_version != plan.model_version:
        return Rejection(f"expected model version {plan.model_version}, got {update.model_version}")
    if update.indices is not None or update.mask_digest != mask.digest():
        return Rejection("the update was made under another mask")
    if update.values.size != mask.kept:
        return Rejection(f"expected {mask.kept} values, got {update.values.size}")
    if not np.isfinite(update.values).all():
        return Rejection("the update has values that are not finite")
    return AdmittedUpdate(update.values, coding.parts_of(data))


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]
