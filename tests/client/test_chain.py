"""Hash chains: the first link that is wrong is named, and a chain that ends before its head is no chain."""

import json
from pathlib import Path

import pytest

from client.chain import CHAIN_START, Chain, Head, remember
from common.errors import LedgerError

Link = tuple[int, str, str]
WHOLE: list[Link] = [(1, "a", "a"), (2, "b", "b"), (3, "c", "c")]


@pytest.mark.parametrize(
    ("links", "length", "last"),
    [([], 0, CHAIN_START), (WHOLE, 3, "c"), (WHOLE, 2, "b"), (WHOLE, 0, CHAIN_START)],
)
def test_a_chain_that_goes_at_least_as_far_as_its_head_is_whole(links: list[Link], length: int, last: str) -> None:
    chain = Chain("entry", length, last)
    for link in links:
        chain.add(*link)
    chain.require_head()
    assert (chain.length, chain.hash) == (len(links), links[-1][1] if links else CHAIN_START)


@pytest.mark.parametrize(
    ("links", "length", "last", "message"),
    [
        ([WHOLE[0], (3, "b", "b"), (4, "c", "c")], 3, "c", "entry 2 was changed, or one before it taken out"),
        ([WHOLE[0], (2, "x", "b"), (3, "x", "c")], 3, "c", "entry 2 was changed"),
        ([(2, "x", "a")], 1, "x", "entry 1 was changed"),
        (WHOLE[:2], 3, "c", "the chain of each entry is 2 long but was 3: it was cut or replaced"),
        (WHOLE[:2], 3, "b", "is 2 long but was 3"),
        (WHOLE, 3, "x", "is 3 long but was 3"),
        (WHOLE, 2, "c", "is 3 long but was 2"),
        ([], 1, CHAIN_START, "is 0 long but was 1"),
        ([], 0, "x", "is 0 long but was 0"),
    ],
)
def test_a_chain_that_was_changed_cut_or_replaced(links: list[Link], length: int, last: str, message: str) -> None:
    chain = Chain("entry", length, last)
    for link in links:
        chain.add(*link)
    with pytest.raises(ValueError, match=message):
        chain.require_head()


def test_a_head_that_cannot_be_written_stops_the_release(tmp_path: Path) -> None:
    remember(tmp_path / "head", Head(2, "a", 1, "b"))
    facts = {"entries": 2, "hash": "a", "releases": 1, "releases_hash": "b"}
    assert json.loads((tmp_path / "head").read_bytes()) == facts
    with pytest.raises(LedgerError, match=r"cannot write .*; nothing was released"):
        remember(tmp_path / "nowhere" / "head", Head())
