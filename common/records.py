"""Our bytes in Flower's records: the only module of ``common`` that knows Flower.

Everything travels in one ConfigRecord of bytes and short strings. A record costs about 500 bytes around its payload
whatever it carries, a second one costs that again, and an Array nearly twice as much.
"""

from dataclasses import dataclass
from functools import lru_cache

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from common.errors import WireError

_RECORD = "fedsieve"


@dataclass(frozen=True, slots=True)
class Request:
    """What a round sends to a site: its plan, the model to start from, and the plan's signature where it has one."""

    plan: bytes
    model: bytes
    signature: bytes = b""

    def to_content(self) -> RecordDict:
        """Return it as the content of a message; the same object may go to many nodes."""
        return RecordDict(
            {_RECORD: ConfigRecord({"plan": self.plan, "model": self.model, "signature": self.signature})}
        )

    @classmethod
    def from_content(cls, content: RecordDict) -> "Request":
        """Parse the content of a train message."""
        record = _only_record(content, {"plan", "model", "signature"})
        return cls(_bytes(record, "plan"), _bytes(record, "model"), _bytes(record, "signature"))


@dataclass(frozen=True, slots=True)
class Release:
    """What a site sends back: its coded update, and nothing else."""

    update: bytes

    def to_content(self) -> RecordDict:
        """Return it as the content of a reply."""
        return RecordDict({_RECORD: ConfigRecord({"update": self.update})})


@dataclass(frozen=True, slots=True)
class Refusal:
    """A site's answer to a plan that it will not carry out; nothing was spent.

    ``for_good``: it will not carry out the next one of this run either, as when its budget is used up.
    """

    reason: str
    for_good: bool = False

    def to_content(self) -> RecordDict:
        """Return it as the content of a reply."""
        return RecordDict({_RECORD: ConfigRecord({"refusal": self.reason[:500], "for-good": self.for_good})})


@dataclass(frozen=True, slots=True)
class ModelWanted:
    """A site's answer to a difference from a model that it does not hold: send it in full. Nothing was spent."""

    def to_content(self) -> RecordDict:
        """Return it as the content of a reply."""
        return RecordDict({_RECORD: ConfigRecord({"model-wanted": True})})


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a site says of itself when a run begins: its number and the size that its operator declares in public.

    ``simulated``: no daemon guards it, and its noise comes from the run's seed.
    """

    site: int
    declared_size: int
    simulated: bool

    def to_content(self) -> RecordDict:
        """Return it as the content of a reply."""
        return RecordDict(
            {
                _RECORD: ConfigRecord(
                    {"site": self.site, "declared-size": self.declared_size, "simulated": self.simulated}
                )
            }
        )

    @classmethod
    def from_content(cls, content: RecordDict) -> "Introduction":
        """Parse the content of a query's reply."""
        record = _only_record(content, {"site", "declared-size", "simulated"})
        site, size, simulated = record["site"], record["declared-size"], record["simulated"]
        if type(site) is not int or type(size) is not int or site < 0 or size < 1:
            raise WireError(f"expected a site number >= 0 and a declared size >= 1, got {site!r} and {size!r}")
        if type(simulated) is not bool:
            raise WireError(f"expected a site to say whether it is simulated, got {simulated!r}")
        return cls(site, size, simulated)


def parse_answer(content: RecordDict) -> Release | Refusal | ModelWanted:
    """Parse the content of a train reply."""
    record = _only_record(content)
    if record.keys() == {"refusal", "for-good"} and isinstance(record["refusal"], str):
        return Refusal(record["refusal"][:500], record["for-good"] is True)
    if record.keys() == {"model-wanted"}:
        return ModelWanted()
    if record.keys() == {"update"}:
        return Release(_bytes(record, "update"))
    raise WireError(f"expected a reply with an update or a refusal, got {_clipped(sorted(record))}")


def message_bytes(message: Message) -> int:
    """Return how many bytes Flower serialises for ``message``: the objects that cross the network, each with its head.

    The object tree is Message -> RecordDict -> ConfigRecord. Parents hold their child's 64-digit name, not its bytes,
    so their size is taken on a stand-in without payload: naming a large payload means hashing it several times. A
    record's size depends on the lengths of its fields alone, so one record of a kind is serialised for all.
    """
    if message.has_error():
        return len(message.deflate())
    content = message.content
    if not all(isinstance(record, ConfigRecord) for record in content.values()):  # not one of ours: the long way
        return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
    stand_in = RecordDict({name: ConfigRecord() for name in content})
    envelope = make_message(metadata=message.metadata, content=stand_in)
    return (
        len(envelope.deflate())
        + len(stand_in.deflate())
        + sum(_record_bytes(r) for r in content.config_records.values())
    )


def _record_bytes(record: ConfigRecord) -> int:
    if all(isinstance(value, bytes) for value in record.values()):
        return _bytes_of_lengths(tuple((name, len(value)) for name, value in record.items()))  # type: ignore[arg-type]
    return len(record.deflate())


@lru_cache(maxsize=64)
def _bytes_of_lengths(lengths: tuple[tuple[str, int], ...]) -> int:
    return len(ConfigRecord({name: bytes(length) for name, length in lengths}).deflate())


def _only_record(content: RecordDict, keys: set[str] | None = None) -> ConfigRecord:
    if list(content) != [_RECORD] or not isinstance(content[_RECORD], ConfigRecord):
        raise WireError(f"expected one ConfigRecord named {_RECORD!r}, got {_clipped(list(content))}")
    record = content.config_records[_RECORD]
    if keys is not None and record.keys() != keys:
        raise WireError(f"expected the fields {sorted(keys)}, got {_clipped(sorted(record))}")
    return record


def _bytes(record: ConfigRecord, key: str) -> bytes:
    value = record[key]
    if not isinstance(value, bytes):
        raise WireError(f"expected {key} as bytes, got {type(value).__name__}")
    return value


def _clipped(value: object) -> str:
    return repr(value)[:200]
