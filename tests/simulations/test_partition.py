import numpy as np
import pytest

from common.errors import DatasetError
from simulations.partition import split

TARGETS = np.repeat(np.arange(10), 100)


@pytest.mark.parametrize("how", ["iid", "dirichlet:0.5", "dirichlet:0.05", "labels:2", "sizes:zipf"])
def test_every_record_belongs_to_exactly_one_site(how: str) -> None:
    parts = split(TARGETS, 7, how, seed=1)
    assert len(parts) == 7
    assert np.sort(np.concatenate(parts)).tolist() == list(range(1000))
    assert min(part.size for part in parts) >= 2
    again, other = split(TARGETS, 7, how, seed=1), split(TARGETS, 7, how, seed=2)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    assert any(a.tolist() != b.tolist() for a, b in zip(parts, other, strict=True))


def test_a_seed_deals_out_the_same_rows_on_every_machine() -> None:
    """Other rows of the same seed would be another experiment under the same name."""
    dealt = [[0, 2, 5, 6], [1, 4, 7, 8], [3, 9, 10, 11]]
    assert [part.tolist() for part in split(np.repeat(np.arange(3), 4), 3, "iid", 7)] == dealt


def test_the_shares_of_zipf() -> None:
    shares = 1 / np.arange(1, 8) / sum(1 / number for number in range(1, 8))
    sizes = [2 + int(share * (1000 - 2 * 7)) for share in shares]
    sizes[0] += 1000 - sum(sizes)
    assert [part.size for part in split(TARGETS, 7, "sizes:zipf", 1)] == sizes


@pytest.mark.parametrize("how", ["iid", "sizes:zipf", "labels:2"])
def test_rows_are_dealt_out_at_random(how: str) -> None:
    """As they come, neighbouring rows may be alike: pictures of one day, loans of one year."""
    for part in split(TARGETS, 7, how, 1)[:3]:
        assert (np.diff(part) > 1).any() and not np.array_equal(part, np.arange(part[0], part[-1] + 1))


def labels_seen(parts: list[np.ndarray]) -> list[int]:
    return [np.unique(TARGETS[part]).size for part in parts]


def test_what_the_kinds_are_for() -> None:
    iid = split(TARGETS, 10, "iid", 1)
    assert {part.size for part in iid} == {100}
    assert min(labels_seen(iid)) == 10
    assert max(labels_seen(split(TARGETS, 10, "labels:2", 1))) <= 3
    # Ten sites and ten classes of equal size: a shard is a class, or half of one.
    assert (
        labels_seen(split(TARGETS, 10, "labels:1", 1)) == labels_seen(split(TARGETS, 10, "labels:0.2", 1)) == [1] * 10
    )
    assert sum(labels_seen(split(TARGETS, 10, "labels:2", 1))) > 12
    skewed = split(TARGETS, 10, "dirichlet:0.1", 1)
    even = split(TARGETS, 10, "dirichlet:100", 1)
    assert np.mean(labels_seen(skewed)) < np.mean(labels_seen(even)) == 10
    sizes = [part.size for part in split(TARGETS, 10, "sizes:zipf", 1)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 5 * sizes[-1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("random", "unknown partition 'random': expected iid, dirichlet:ALPHA"),
        ("iid:3", "unknown partition"),
        ("sizes:normal", "unknown partition"),
        ("dirichlet:", "a number above 0"),
        ("dirichlet:-1", "a number above 0"),
        ("dirichlet:0", "a number above 0"),
        ("dirichlet:inf", "a number above 0"),
        ("labels:nan", "a number above 0"),
        ("labels:x", "a number above 0"),
        ("dirichlet:1e-9", "in 100 draws: raise ALPHA"),
    ],
)
def test_partitions_that_cannot_be_made(how: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        split(TARGETS, 10, how, 1)


def test_too_few_records() -> None:
    assert {part.size for part in split(np.zeros(10), 5, "iid", 1)} == {2}
    assert [part.size for part in split(np.zeros(10), 5, "sizes:zipf", 1)] == [2] * 5
    assert [part.size for part in split(np.zeros(10), 1, "iid", 1)] == [10]
    assert [part.size for part in split(np.zeros(4, np.int64), 2, "dirichlet:5", 1)] == [2, 2]
    for targets, sites in ((np.zeros(10), 6), (np.zeros(9), 5), (np.zeros(10), 0)):
        with pytest.raises(DatasetError, match=f"at least 2 records a site, got {targets.size} for {sites} sites"):
            split(targets, sites, "iid", 1)


@pytest.mark.parametrize("how", ["dirichlet:1", "labels:2"])
def test_numbers_are_no_classes_to_deal_out(how: str) -> None:
    with pytest.raises(DatasetError, match="deals out classes, but the targets are numbers"):
        split(np.linspace(0, 1, 100), 5, how, 1)
