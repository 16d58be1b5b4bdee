"""Admission: every reply becomes an AdmittedUpdate, or a Rejection that says why; none can end the run."""

from dataclasses import dataclass

import numpy as np
from flwr.app import Message

from common import coding
from common.coding import PartBytes, Values
from common.errors import WireError
from common.mask import Indices
from common.plan import RoundPlan
from common.records import ModelWanted, Refusal, parse_answer


@dataclass(frozen=True, slots=True)
class AdmittedUpdate:
    """The values of one site, finite, of the right round, model and mask; ``indices`` where the site chose them."""

    values: Values
    parts: PartBytes
    indices: Indices | None = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """A reply that does not count. ``spent`` is false only where the site said that nothing was spent.

    ``for_good``: the site said that it will refuse the rest of the run too.
    """

    reason: str
    spent: bool = True
    for_good: bool = False


def admit(reply: Message, plan: RoundPlan, declared_size: int) -> AdmittedUpdate | Rejection:
    """Check a reply of a site that declared a size against the plan that it answers."""
    if reply.has_error():
        return Rejection(f"the site failed: {_last_line(reply.error.reason or 'no reason given')}")
    try:
        answer = parse_answer(reply.content)
        if isinstance(answer, Refusal):
            return Rejection(f"refused: {_last_line(answer.reason)}", spent=False, for_good=answer.for_good)
        if isinstance(answer, ModelWanted):  # it was given the whole model and asks for it once more
            return Rejection("the site asked for the whole model twice", spent=False)
        return admit_update(answer.update, plan, declared_size)
    except WireError as error:
        return Rejection(str(error))


def wants_model(reply: Message) -> bool:
    """Tell whether a site asks for the whole model before it can carry out the plan."""
    try:
        return not reply.has_error() and isinstance(parse_answer(reply.content), ModelWanted)
    except WireError:
        return False


def admit_update(data: bytes, plan: RoundPlan, declared_size: int) -> AdmittedUpdate | Rejection:
    """Check an encoded update of a site that declared a size against the plan that it answers; may raise WireError."""
    mask, most, uploads = plan.mask, plan.how.most_values(plan), plan.how.uploads
    largest = (
        coding.HEADER_BYTES
        + coding.largest_value_bytes(plan.value_coding, most)
        + coding.largest_index_bytes(plan.index_coding_used, mask.size, most)
    )
    if len(data) > largest:
        return Rejection(f"expected at most {largest} bytes, got {len(data)}")
    update = coding.decode(
        data,
        size=mask.size,
        max_kept=most,
        value_coding=plan.value_coding,
        index_coding=plan.index_coding_used,
        grid_step=plan.grid_step(declared_size),
    )
    if update.round != plan.round:
        return Rejection(f"expected an answer to round {plan.round}, got one to round {update.round}")
    if update.model_version != plan.model_version:
        return Rejection(f"expected model version {plan.model_version}, got {update.model_version}")
    if update.mask_digest != mask.digest():
        return Rejection("the update was made under another mask")
    chosen = uploads == "indices and values"
    if update.values.size != most and not chosen:
        return Rejection(f"expected {most} values, got {update.values.size}")
    if update.indices is not None and not chosen and not np.array_equal(update.indices, mask.indices()):
        return Rejection("the update speaks of other coordinates than the mask's")
    if not np.isfinite(update.values).all():
        return Rejection("the update has values that are not finite")
    return AdmittedUpdate(update.values, coding.parts_of(data), update.indices if chosen else None)


def _last_line(text: str) -> str:
    """Return the end of a report: that of a traceback says what was wrong."""
    return (text.strip().splitlines() or [""])[-1][:300]
