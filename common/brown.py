"""The Brown corpus as training samples of word embeddings (CBOW with negative sampling)."""

import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DatasetError

VOCABULARY, NEGATIVES = 1000, 8
WORDS_PER_RECORD = 2 + NEGATIVES
_REACH = 2  # words on each side: a window of 4
_TRAIN, _TEST = 200_000, 50_000
_SEED = 1
_TEXT = re.compile(r"(^|/)c[a-r]\d\d$")
_WORD = re.compile(r"[a-z]+(?:['-][a-z]+)*")
# Function words and the auxiliary verbs, which stand beside everything.
_STOP_WORDS = (
    "a about above after again against all almost along also although always am among an and another any are "
    "around as at away back be because been before being below between both but by came can cannot come could "
    "did do does done down during each either enough even ever every few first for from further get give given "
    "go got had has have he her here hers herself him himself his how however i if in into is it its itself "
    "just last less let like made make many may me might more most mr mrs much must my myself near never new "
    "next no nor not now of off often on once one only onto or other others our ours ourselves out over own per "
    "perhaps put quite rather said same say see seem seemed shall she should since so some such take than that "
    "the their theirs them themselves then there these they this those though three through thus to together "
    "too toward two under until up upon us use used very was way we well went were what when where whether "
    "which while who whole whom whose why will with within without would yet you your yours yourself"
)


def read(path: Path, vocabulary: int = VOCABULARY, train: int = _TRAIN, test: int = _TEST) -> dict[str, NDArray[Any]]:
    """Return samples of (target word, context word, 8 negative words) as numbers of words, and targets that are all 0.

    ``path`` is the corpus' zip: one file per text, tokens ``word/tag``. Kept are the ``vocabulary`` most frequent words
    that are no stop words; a context word is at most 2 words away in what is left of the text; negatives are drawn
    uniformly. A model scores the words after the first one against it: the right one comes first, number 0.
    The list of words is taken as public: it is the only thing here that all records decide together.
    Source: dp-selection-wide-networks, section 6.1.
    """
    texts = _texts(path)
    counts = Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary]
    if len(ranked) < vocabulary:
        raise DatasetError(f"{path} has {len(ranked)} different words, expected at least {vocabulary}")
    number = {word: index for index, word in enumerate(ranked)}
    pairs = np.concatenate([_pairs(np.array([number[word] for word in text if word in number])) for text in texts])
    if len(pairs) < 2:
        raise DatasetError(f"{path} gives {len(pairs)} pairs of words, expected at least 2")
    if len(pairs) < train + test:  # a cut of the corpus: in the same proportion
        train = len(pairs) * train // (train + test)
        test = len(pairs) - train
    rng = np.random.Generator(np.random.Philox(key=_SEED))
    chosen = rng.permutation(len(pairs))[: train + test]
    negatives = rng.integers(vocabulary, size=(len(chosen), NEGATIVES))
    inputs = np.concatenate([pairs[chosen], negatives], axis=1).astype(np.float32)  # (records, 10)
    return {
        "train_inputs": inputs[:train],
        "train_targets": np.zeros(train, np.int64),
        "test_inputs": inputs[train:],
        "test_targets": np.zeros(test, np.int64),
    }


def _texts(path: Path) -> list[list[str]]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if _TEXT.search(name))
            contents = [archive.read(name).decode("utf-8", errors="replace") for name in names]
    except FileNotFoundError:
        raise DatasetError(f"no file {path}: expected the zip of the Brown corpus") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    if not contents:
        raise DatasetError(f"{path} holds no texts named like brown/ca01: it is not the Brown corpus")
    texts, stop_words = [], frozenset(_STOP_WORDS.split())
    for content in contents:
        words = (token.rpartition("/")[0].lower() for token in content.split())
        texts.append([word for word in words if _WORD.fullmatch(word) and word not in stop_words])
    return texts


def _pairs(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each word with each other one that is at most ``_REACH`` away, shape (pairs, 2)."""
    found = [np.zeros((0, 2), np.int64)]
    for distance in range(1, _REACH + 1):
        ahead = np.stack([words[:-distance], words[distance:]], axis=1) if words.size > distance else found[0]
        found += [ahead, ahead[:, ::-1]]
    return np.concatenate(found)
