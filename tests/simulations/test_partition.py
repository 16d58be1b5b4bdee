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


def labels_seen(parts: list[np.ndarray]) -> list[int]:
    return [np.unique(TARGETS[part]).size for part in parts]


def test_what_the_kinds_are_for() -> None:
    iid = split(TARGETS, 10, "iid", 1)
    assert {part.size for part in iid} == {100}
    assert min(labels_seen(iid)) == 10
    assert max(labels_seen(split(TARGETS, 10, "labels:2", 1))) <= 3
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
        ("labels:x", "a number above 0"),
        ("dirichlet:1e-9", "raise ALPHA"),
    ],
)
def test_partitions_that_cannot_be_made(how: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        split(TARGETS, 10, how, 1)


def test_too_few_records() -> None:
    with pytest.raises(DatasetError, match="at least 2 records a site, got 10 for 6 sites"):
        split(np.zeros(10), 6, "iid", 1)
