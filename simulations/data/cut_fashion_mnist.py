"""Cut the small data set that ships with the repository from the full Fashion-MNIST.

    python simulations/data/cut_fashion_mnist.py [FOLDER]

FOLDER holds the four IDX files (default: where Debian's package dataset-fashion-mnist puts them). Takes 1,200 train
and 200 test pictures of every class with a fixed seed; the same input gives the same arrays.
"""

import sys
import zipfile
from pathlib import Path

import numpy as np

from common.datasets import load

SEED = 20170825
TARGET = Path(__file__).with_name("fashion-mnist-12k.npz")


def cut(inputs: np.ndarray, targets: np.ndarray, per_class: int, rng: np.random.Generator) -> tuple:
    """Return ``per_class`` records of every class, in a random order."""
    chosen = [rng.choice(np.flatnonzero(targets == label), per_class, replace=False) for label in np.unique(targets)]
    rows = rng.permutation(np.concatenate(chosen))
    return inputs[rows], targets[rows].astype(np.uint8)


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(f"{name}.npy")  # a fixed date: the same arrays give the same file
    entry.compress_type = zipfile.ZIP_LZMA
    return entry


def main(folder: str) -> None:
    """Write the cut beside this script."""
    full, rng = load(folder), np.random.default_rng(SEED)
    train_inputs, train_targets = cut(full.train_inputs, full.train_targets, 1200, rng)
    test_inputs, test_targets = cut(full.test_inputs, full.test_targets, 200, rng)
    arrays = {
        "train_inputs": train_inputs,
        "train_targets": train_targets,
        "test_inputs": test_inputs,
        "test_targets": test_targets,
    }
    # An .npz is a zip of .npy files; numpy.load reads LZMA too, and it saves a megabyte over savez_compressed.
    with zipfile.ZipFile(TARGET, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            with archive.open(_entry(name), "w") as file:
                np.lib.format.write_array(file, array)
    print(f"{TARGET}: {len(train_inputs)} + {len(test_inputs)} pictures, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "/usr/share/datasets/fashion-mnist")
