"""Canaries in a language model: are phrases that were put into the text found again in the embeddings?

Random three-word phrases are put into the training data several times each; after training, each is ranked by its
perplexity among random phrases that begin alike. Phrases that left no trace have ranks that are uniform.
Source: dp-selection-wide-networks, section 6.3, after Carlini et al., "The secret sharer" (2019).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from common.datasets import Dataset
from common.errors import ConfigError
from simulations.attacks.settings import require_at_least

WORDS = 3
_BINS = 10

Phrases = NDArray[np.int64]  # (count, WORDS), numbers of words


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """How many canaries, how often each is in the data, and among how many random phrases it is ranked."""

    canaries: int = 1000
    insertions: int = 3
    phrases: int = 10_000

    def __post_init__(self) -> None:
        require_at_least(self, 1, "canaries", "phrases")
        require_at_least(self, 0, "insertions")


def random_phrases(count: int, vocabulary: int, rng: np.random.Generator) -> Phrases:
    """Return phrases of words that are drawn uniformly."""
    return rng.integers(vocabulary, size=(count, WORDS))


def with_canaries(dataset: Dataset, phrases: Phrases, insertions: int, vocabulary: int, seed: int) -> Dataset:
    """Return the data with each phrase in it ``insertions`` times, at random positions.

    A record is (word, word near it, negatives): a phrase gives one for each ordered pair of its words, as text would.
    """
    if dataset.train_inputs.ndim != 2 or dataset.train_inputs.shape[1] < WORDS:
        raise ConfigError(f"expected records of a word, a word near it and negatives, got {dataset.train_inputs.shape}")
    rng = np.random.default_rng([seed, 1])
    one, other = np.nonzero(~np.eye(WORDS, dtype=np.bool_))
    pairs = np.tile(np.stack([phrases[:, one], phrases[:, other]], axis=2).reshape(-1, 2), (insertions, 1))
    negatives = rng.integers(vocabulary, size=(len(pairs), dataset.train_inputs.shape[1] - 2))
    added = np.concatenate([pairs, negatives], axis=1).astype(np.float32)
    order = rng.permutation(len(dataset.train_inputs) + len(added))
    return Dataset(
        np.concatenate([dataset.train_inputs.astype(np.float32), added])[order],
        np.concatenate([dataset.train_targets, np.zeros(len(added), np.int64)])[order],
        dataset.test_inputs,
        dataset.test_targets,
    )


def ranks(
    embedding: NDArray[np.float32], phrases: Phrases, among: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return, for each phrase (a, b, c), the share of ``among`` random phrases (a, b', c') that are less likely.

    Computes: the log-likelihood log p(b | a) + log p(c | a, b), with p the softmax over all words of the product of
    their embeddings with the mean embedding of the words before.
    Guarantees: for a phrase that is independent of the embedding the result is uniform on [0, 1]; 1 is memorised.
    """
    vectors = embedding.astype(np.float64)
    products = vectors @ vectors.T  # (vocabulary, vocabulary)
    first = products - logsumexp(products, axis=1, keepdims=True)  # log p(b | a), row a
    found = np.empty(len(phrases))
    for number, (a, b, c) in enumerate(phrases):
        both = (products[a] + products) / 2  # row b: the product of every word with the mean of a and b
        scale = logsumexp(both, axis=1)
        likelihood = first[a, b] + both[b, c] - scale[b]
        others = rng.integers(len(vectors), size=(2, among))
        likelihoods = first[a, others[0]] + both[others[0], others[1]] - scale[others[0]]
        # Equal ones count by a coin, else a model that knows nothing would look suspicious.
        below = (likelihoods < likelihood).sum() + rng.integers((likelihoods == likelihood).sum() + 1)
        found[number] = (below + rng.random()) / (among + 1)  # uniform exactly, not in steps of 1 / among
    return found


def uniform_distance(shares: NDArray[np.float64]) -> float:
    """Return the chi-squared distance of shares in [0, 1] from uniform, over ten bins.

    Computes: sum over bins of (share of the bin - 1/10)^2 / (1/10), which is Pearson's statistic over the count. It is
    about 9 / count where the shares are uniform, and 9 at most.
    """
    counts, _ = np.histogram(shares, bins=_BINS, range=(0, 1))
    return float(_BINS * np.square(counts / len(shares) - 1 / _BINS).sum())


def exposure(shares: NDArray[np.float64], among: int) -> float:
    """Return the mean exposure in bits: log2(among + 1) - log2(rank), with rank 1 for what is more likely than all."""
    rank = np.ceil((1 - shares) * (among + 1)).clip(min=1)
    return float(np.mean(np.log2(among + 1) - np.log2(rank)))
