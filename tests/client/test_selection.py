"""Private selection: the right distribution, the right sensitivity, and nothing that breaks it."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from scipy import stats

from client.selection import (
    second_clip,
    second_clip_sensitivity,
    select_exponential,
    select_random,
    select_sparse_vector,
)
from common.randomness import KeyStream, SecureRandomness, gumbel, laplace, open_uniforms
from simulations.benchmarks.methods import choosing
from simulations.seeded import GeneratorRandomness

MEAN = np.array([0.9, -0.5, 0.0, 2.0, 0.3])
EPSILON, ENTRY_BOUND, RECORD_BOUND = 1.6, 1.0, 0.8


def _randomness(seed: int = 0) -> GeneratorRandomness:
    return GeneratorRandomness(np.random.default_rng(seed), np.random.default_rng([seed, 1]))


def _peeling_probabilities(picks: int, weight_scale: float = 1.0) -> dict[tuple[int, ...], float]:
    """Return the probability of each set under ``picks`` rounds of the exponential mechanism, from its definition."""
    sensitivity = min(ENTRY_BOUND, RECORD_BOUND)
    utilities = np.minimum(np.abs(MEAN), ENTRY_BOUND)
    weights = np.exp(weight_scale * EPSILON * utilities / (2 * sensitivity))
    chances: dict[tuple[int, ...], float] = {}
    for sequence in permutations(range(MEAN.size), picks):
        chance, left = 1.0, weights.sum()
        for taken in sequence:
            chance *= weights[taken] / left
            left -= weights[taken]
        key = tuple(sorted(sequence))
        chances[key] = chances.get(key, 0.0) + chance
    return chances


def _p_value(drawn: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    draws = sum(drawn.values())
    keys = sorted(chances)
    return float(stats.chisquare([drawn[key] for key in keys], [draws * chances[key] for key in keys]).pvalue)


def test_one_shot_gumbel_has_the_distribution_of_peeling() -> None:
    randomness = _randomness()
    drawn = Counter(
        tuple(
            select_exponential(
                MEAN,
                picks=2,
                pick_epsilon=EPSILON,
                entry_bound=ENTRY_BOUND,
                record_bound=RECORD_BOUND,
                randomness=randomness,
            ).tolist()
        )
        for _ in range(10_000)
    )
    assert _p_value(drawn, _peeling_probabilities(2)) > 1e-3
    for wrong in (2 / 3, 3 / 2):  # the near miss: noise of another scale has another distribution
        assert _p_value(drawn, _peeling_probabilities(2, wrong)) < 1e-6


def test_choosing_costs_less_than_the_noise_of_all_coordinates() -> None:
    """A ratio, so that it means the same on every machine: 'make bench-methods' has the seconds."""
    cost = choosing(size=300_000, picks=300)
    assert cost.cpu < cost.peer_cpu


def test_the_likelihood_of_every_set_is_within_the_range_that_is_paid_for() -> None:
    # Neighbours that move every utility by the sensitivity, up for some and down for others: the worst there is.
    def chance(mean: np.ndarray) -> np.ndarray:
        weights = np.exp(EPSILON * np.minimum(np.abs(mean), ENTRY_BOUND) / (2 * RECORD_BOUND))
        return weights / weights.sum()

    losses = np.log(chance(np.array([0.9, 0.8, 0.1, 0.0])) / chance(np.array([0.1, 0.0, 0.9, 0.8])))
    assert np.ptp(losses) == pytest.approx(EPSILON)
    assert np.abs(losses).max() <= EPSILON


def test_what_is_not_finite_never_wins_and_all_can_be_taken() -> None:
    mean = np.array([np.nan, np.inf, -np.inf, 1.0, 1.0])
    common = {"pick_epsilon": 1e4, "record_bound": 1.0, "randomness": _randomness()}
    assert select_exponential(mean, picks=2, entry_bound=1.0, **common).tolist() == [3, 4]
    assert select_exponential(mean, picks=5, entry_bound=1.0, **common).tolist() == [0, 1, 2, 3, 4]
    assert select_sparse_vector(mean, picks=5, threshold=0.5, **common).tolist() == [3, 4]


def test_sparse_vector_finds_what_passes_and_stops_when_paid_for() -> None:
    mean = np.zeros(5000)
    mean[[7, 40, 4999]] = [1.0, -1.0, 1.0]
    common = {"pick_epsilon": 1e4, "record_bound": 1.0, "threshold": 0.5}
    assert select_sparse_vector(mean, picks=9, randomness=_randomness(), **common).tolist() == [7, 40, 4999]
    counts = [
        select_sparse_vector(np.ones(50), picks=3, randomness=_randomness(seed), **common).size for seed in range(20)
    ]
    assert counts == [3] * 20  # the paper's loop ends when its count exceeds c1, one answer later
    assert select_sparse_vector(np.zeros(50), picks=3, randomness=_randomness(), **common).size == 0
    firsts = {tuple(select_sparse_vector(np.ones(50), picks=3, randomness=_randomness(s), **common)) for s in range(9)}
    assert len(firsts) == 9  # no coordinate is favoured by its place


def test_sparse_vector_noise_has_its_scales() -> None:
    # With one coordinate the answer is yes with probability P(2 s Lap - s Lap' >= gap); s = 2 record_bound / epsilon.
    scale = 2 * RECORD_BOUND / EPSILON
    rng = np.random.default_rng(3)

    def expected(factor: float) -> float:
        noise = 2 * scale * factor * rng.laplace(size=10**6) - scale * factor * rng.laplace(size=10**6)
        return float(np.mean(0.2 + noise >= 1.7))

    randomness, draws = _randomness(5), 8000
    yes = sum(
        select_sparse_vector(
            np.array([-0.2]),
            picks=1,
            pick_epsilon=EPSILON,
            threshold=1.7,
            record_bound=RECORD_BOUND,
            randomness=randomness,
        ).size
        for _ in range(draws)
    )
    assert stats.binomtest(yes, draws, expected(1.0)).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert stats.binomtest(yes, draws, expected(wrong)).pvalue < 1e-6


def test_random_selection_is_uniform() -> None:
    randomness = _randomness(2)
    drawn = Counter(tuple(select_random(5, picks=2, randomness=randomness).tolist()) for _ in range(5000))
    assert len(drawn) == 10
    assert stats.chisquare(list(drawn.values())).pvalue > 1e-3


def test_second_clip_is_a_projection() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        first, second = rng.normal(size=(2, 4)) * rng.exponential(size=(2, 1))
        moved = np.linalg.norm(second_clip(first, 0.7) - second_clip(second, 0.7))
        assert moved <= second_clip_sensitivity(float(np.linalg.norm(first - second)), 0.7) + 1e-12
    assert second_clip(np.array([np.nan, 1.0]), 1.0).tolist() == [0.0, 0.0]
    assert second_clip_sensitivity(15 / 20, 0.05) == 0.1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"picks": 0}, "picks"),
        ({"picks": 6}, "picks"),
        ({"pick_epsilon": 0.0}, "pick_epsilon"),
        ({"record_bound": np.nan}, "record_bound"),
        ({"entry_bound": 0.0}, "entry_bound"),
    ],
)
def test_bad_parameters_are_named(change: dict[str, float], expected: str) -> None:
    parameters = {"picks": 1, "pick_epsilon": 1.0, "entry_bound": 1.0, "record_bound": 1.0, **change}
    with pytest.raises(ValueError, match=expected):
        select_exponential(MEAN, randomness=_randomness(), **parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "randomness", [_randomness(), SecureRandomness(KeyStream(bytes(32)), KeyStream(bytes(range(32))))]
)
def test_laplace_and_gumbel_have_their_distributions(randomness: GeneratorRandomness) -> None:
    for draw, distribution in ((laplace, stats.laplace), (gumbel, stats.gumbel_r)):
        draws = draw(randomness, 20_000)
        assert stats.kstest(draws, distribution.cdf).pvalue > 1e-4
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(draws * wrong, distribution.cdf).pvalue < 1e-6


def test_uniforms_have_no_smallest_one() -> None:
    """A source of zero words: a cut tail would be an output that one data set can give and its neighbour cannot."""
    words = iter([np.array([0, 2**63], np.uint64), np.array([0], np.uint64), np.array([2**62], np.uint64)])
    assert open_uniforms(lambda count: next(words), 2).tolist() == [2.0**-130, 0.5]
    top = open_uniforms(lambda count: np.full(count, 2**64 - 1, np.uint64), 1)
    assert top[0] < 1
    assert np.isfinite(np.log1p(-top)).all()
