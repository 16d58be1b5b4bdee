import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import mask as mask_module
from common.errors import ConfigError
from common.mask import MaskSpec, held_mask, hold, kept_count


@pytest.mark.parametrize(
    ("spec", "indices", "digest"),
    [
        (MaskSpec(1, 0, 20, 5), [3, 5, 8, 15, 18], 1390006475),
        (MaskSpec(1, 1, 20, 5), [2, 5, 7, 10, 14], 2833379386),
        (MaskSpec(2**63 - 1, 7, 1000, 3), [418, 706, 735], 2385435529),
        (MaskSpec(1, 0, 10, 7, "", 2, 5), [0, 1, 2, 4, 5, 6, 7], 3104105346),
    ],
)
def test_golden_vectors(spec: MaskSpec, indices: list[int], digest: int) -> None:
    assert spec.indices().tolist() == indices
    assert spec.digest() == digest


def test_golden_mask_of_the_demo_model() -> None:
    indices = MaskSpec(42, 3, 26010, 7803).indices()
    expected = "586f8a392fe69b227069cd660ff0d332d38f14950db5e0cb3beceae7b182f3b8"
    assert hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest() == expected


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(1, 3000), st.data())
def test_exactly_k_sorted_unique_in_range(seed: int, epoch: int, size: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, size))
    indices = MaskSpec(seed, epoch, size, kept).indices()
    assert indices.size == kept
    assert (np.diff(indices) > 0).all()
    assert indices[0] >= 0 and indices[-1] < size


@given(st.integers(1, 500), st.integers(0, 2**32))
def test_kth_smallest_is_what_sorting_gives(size: int, seed: int) -> None:
    words = np.random.Philox(key=seed).random_raw(size)
    kth = 1 + seed % size
    assert mask_module._kth_smallest(words, kth) == np.sort(words)[kth - 1]


def test_kth_smallest_of_words_that_are_not_uniform() -> None:
    words = np.arange(1000, dtype=np.uint64)
    assert mask_module._kth_smallest(words, 300) == 299


def test_of_uniform_words_a_narrow_band_is_partitioned_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    words, partition = np.random.default_rng(3).integers(0, 2**64 - 1, 100_000, np.uint64), np.partition
    sizes: list[int] = []
    monkeypatch.setattr(np, "partition", lambda band, rank: sizes.append(band.size) or partition(band, rank))
    for kth in (1, 30_000, 50_000, 99_999):
        assert mask_module._kth_smallest(words, kth) == partition(words, kth - 1)[kth - 1]
    assert len(sizes) == 4 and max(sizes) < 4000  # 16 standard deviations of the binomial distribution: 2530


def test_ties_go_to_the_smallest_index(monkeypatch: pytest.MonkeyPatch) -> None:
    class FewValues:
        def __init__(self, **_: object) -> None:
            pass

        def random_raw(self, size: int) -> np.ndarray:
            return np.array([9, 2, 5, 5, 1, 5, 5, 2], dtype=np.uint64)[:size]

    monkeypatch.setattr(np.random, "Philox", FewValues)
    mask_module._draw.cache_clear()
    try:
        # The five smallest are 1, 2, 2 and two of the four fives: the first two.
        assert MaskSpec(0, 0, 8, 5).indices().tolist() == [1, 2, 3, 4, 7]
    finally:
        mask_module._draw.cache_clear()


def test_every_coordinate_is_kept_equally_often() -> None:
    epochs, size, kept = 4000, 40, 10
    counts = np.zeros(size)
    for epoch in range(epochs):
        counts[MaskSpec(5, epoch, size, kept).indices()] += 1
    share = kept / size
    statistic = ((counts - epochs * share) ** 2).sum() / (epochs * share * (1 - share))
    # About chi-squared with 39 degrees of freedom: 90 is beyond its 99.999 % point, and 15 below its 0.1 % point.
    assert 15 < statistic < 90


def test_epochs_and_seeds_give_unrelated_masks() -> None:
    def overlap(a: MaskSpec, b: MaskSpec) -> int:
        return np.intersect1d(a.indices(), b.indices()).size

    base = MaskSpec(1, 0, 10_000, 3000)
    for other in (MaskSpec(1, 1, 10_000, 3000), MaskSpec(2, 0, 10_000, 3000)):
        assert 750 < overlap(base, other) < 1050  # 900 expected, standard deviation 21


def test_a_denser_mask_of_the_same_epoch_contains_the_sparser() -> None:
    sparse, dense = MaskSpec(3, 2, 1000, 100).indices(), MaskSpec(3, 2, 1000, 400).indices()
    assert np.isin(sparse, dense).all()


@pytest.mark.parametrize(
    "spec", [MaskSpec(1, 0, 10, 3), MaskSpec(1, 0, 10, 7, "", 2, 5), MaskSpec(1, 0, 10, 2, hold(np.array([0, 9])))]
)
def test_indices_cannot_be_changed_by_their_user(spec: MaskSpec) -> None:
    hold(np.array([0, 9]))
    with pytest.raises(ValueError):
        spec.indices()[0] = 0


def test_the_chosen_masks_used_last_are_held() -> None:
    mask_module.let_go()
    digests = [hold(np.arange(count)) for count in range(1, 17)]
    assert held_mask(digests[0]) is not None  # used after the second one
    assert hold(np.arange(3)) == digests[2]  # and so is the third one
    hold(np.arange(100))
    hold(np.arange(101))
    held = [digest in mask_module._HELD for digest in digests]
    assert held == [True, False, True, False] + [True] * 12
    mask_module.let_go()
    assert held_mask(digests[0]) is None


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("seed", 0, -1),
        ("seed", 2**63 - 1, 2**63),
        ("epoch", 0, -1),
        ("epoch", 2**32 - 1, 2**32),
        ("kept", 5, 4),  # fewer than each of the draws keeps
        ("kept", 10, 11),
        ("size", 8, 7),
        ("size", 2**32 - 1, 2**32),
        ("drawn_kept", 1, 0),
        ("drawn_kept", 8, 9),
    ],
)
def test_impossible_masks_are_refused(field: str, inside: int, outside: int) -> None:
    good = {"seed": 1, "epoch": 0, "size": 10, "kept": 8, "draws": 2, "drawn_kept": 5}
    MaskSpec(**{**good, field: inside})
    with pytest.raises(ConfigError, match="expected"):
        MaskSpec(**{**good, field: outside})


def test_a_mask_keeps_one_coordinate_at_least() -> None:
    assert MaskSpec(1, 0, 10, 1).indices().size == 1
    with pytest.raises(ConfigError, match="expected 1 <= kept"):
        MaskSpec(1, 0, 10, 0)


def test_a_chosen_mask_lies_within_the_model() -> None:
    chosen = hold(np.array([0, 9]))
    assert MaskSpec(1, 0, 10, 2, chosen).indices().tolist() == [0, 9]
    with pytest.raises(ConfigError, match="does not keep 2 of 9 coordinates"):
        MaskSpec(1, 0, 9, 2, chosen).indices()


def test_kept_count() -> None:
    assert kept_count(26010, 0.3) == 7803
    assert kept_count(3, 0.01) == 1
    assert kept_count(3, 1.0) == 3 and kept_count(3, math.ulp(0.0)) == 1
    for density in (0.0, -0.1, math.nextafter(1, 2), float("nan")):
        with pytest.raises(ConfigError, match="final-density"):
            kept_count(100, density)
