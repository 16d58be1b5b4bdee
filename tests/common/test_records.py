import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from common.errors import WireError
from common.records import Introduction, Refusal, Release, Request, message_bytes, parse_answer


@pytest.fixture(autouse=True)
def task_identity() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def in_full(message: Message) -> int:
    """Return what Flower's own serialisation of every object of the tree adds up to."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


@pytest.mark.parametrize("size", [0, 1, 200, 70_000])
def test_message_bytes_are_what_flower_serialises(size: int) -> None:
    request = Message(Request(b"p" * 300, b"m" * size).to_content(), 7, "train", group_id="3")
    assert message_bytes(request) == in_full(request)
    request.metadata.__dict__["_message_id"] = "a-message-id"
    reply = Message(Release(b"u" * size).to_content(), reply_to=request)
    assert message_bytes(reply) == in_full(reply)
    failure = Message(Error(1, "no"), reply_to=request)
    assert message_bytes(failure) == in_full(failure)


def test_message_bytes_of_arrays_in_a_reply_that_is_not_ours() -> None:
    content = RecordDict({"arrays": ArrayRecord({"a": Array(np.zeros(100, np.float32))})})
    message = Message(content, 7, "train")
    assert message_bytes(message) == in_full(message)


def test_round_trips() -> None:
    assert Request.from_content(Request(b"a", b"b").to_content()) == Request(b"a", b"b")
    for said in (Introduction(3, 50, simulated=False), Introduction(3, 50, simulated=True)):
        assert Introduction.from_content(said.to_content()) == said
    assert parse_answer(Release(b"xyz").to_content()) == Release(b"xyz")
    assert parse_answer(Refusal("no").to_content()) == Refusal("no")


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"other": ConfigRecord({"update": b""})}),
        RecordDict({"fedsieve": ConfigRecord({})}),
        RecordDict({"fedsieve": ConfigRecord({"update": "text"})}),
        RecordDict({"fedsieve": ConfigRecord({"update": b"", "more": 1})}),
        RecordDict({"fedsieve": ConfigRecord({"refusal": 7})}),
        RecordDict({"fedsieve": ArrayRecord({"a": Array(np.zeros(3))})}),
        RecordDict({"fedsieve": ConfigRecord({"update": b""}), "second": ConfigRecord({})}),
    ],
)
def test_answers_that_are_none(content: RecordDict) -> None:
    with pytest.raises(WireError):
        parse_answer(content)


@pytest.mark.parametrize(
    "fields", [{}, {"plan": b"", "model": b""}, {"plan": b"", "model": b"", "signature": b"", "more": b""}]
)
def test_requests_that_are_none(fields: dict[str, bytes]) -> None:
    with pytest.raises(WireError, match="expected the fields"):
        Request.from_content(RecordDict({"fedsieve": ConfigRecord(fields)}))


def test_reasons_are_cut_on_either_side() -> None:
    content = Refusal("x" * 600, True).to_content()
    assert parse_answer(content) == Refusal("x" * 500, True)
    content["fedsieve"] = ConfigRecord({"refusal": "y" * 600, "for-good": False})
    assert parse_answer(content) == Refusal("y" * 500, False)


def test_the_smallest_introduction() -> None:
    assert Introduction.from_content(Introduction(0, 1, True).to_content()) == Introduction(0, 1, True)


@pytest.mark.parametrize(("site", "size"), [(-1, 5), (0, 0), ("0", 5), (True, 5)])
def test_introductions_that_are_none(site: object, size: object) -> None:
    content = RecordDict({"fedsieve": ConfigRecord({"site": site, "declared-size": size, "simulated": True})})
    with pytest.raises(WireError, match="site number"):
        Introduction.from_content(content)


@pytest.mark.parametrize("simulated", [1, "yes", 0, [True]])
def test_a_site_that_does_not_say_whether_it_is_simulated_is_refused(simulated: object) -> None:
    content = RecordDict({"fedsieve": ConfigRecord({"site": 1, "declared-size": 5, "simulated": simulated})})
    with pytest.raises(WireError, match="whether it is simulated, got"):
        Introduction.from_content(content)
