"""Data sets: where a name is found on disk, and how it is read. Nothing is ever downloaded from here."""

import gzip
import importlib
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DatasetError

SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "simulations" / "data"
_IDX_FILES = {
    "train_inputs": "train-images-idx3-ubyte.gz",
    "train_targets": "train-labels-idx1-ubyte.gz",
    "test_inputs": "t10k-images-idx3-ubyte.gz",
    "test_targets": "t10k-labels-idx1-ubyte.gz",
}
_SYSTEM_FOLDERS = (Path("/usr/share/datasets"), Path("/usr/local/share/datasets"))


@dataclass(frozen=True, slots=True)
class Dataset:
    """Records to train on (split among the sites of a simulation) and the server's own test set.

    Inputs are float32, or uint8 pictures that ``as_floats`` scales to [0, 1]. No statistic of the data is ever used.
    """

    train_inputs: NDArray[Any]
    train_targets: NDArray[np.int64]
    test_inputs: NDArray[Any]
    test_targets: NDArray[np.int64]

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            inputs, targets = getattr(self, f"{part}_inputs"), getattr(self, f"{part}_targets")
            if inputs.dtype not in (np.uint8, np.float32):
                raise DatasetError(f"expected {part} inputs of dtype uint8 or float32, got {inputs.dtype}")
            if len(inputs) != len(targets):
                raise DatasetError(f"expected as many {part} inputs as targets, got {len(inputs)} and {len(targets)}")
        if not len(self.train_inputs):
            raise DatasetError("expected at least one record to train on, got none")


def as_floats(inputs: NDArray[Any]) -> NDArray[np.float32]:
    """Return a batch as float32; pictures of uint8 are divided by 255."""
    if inputs.dtype == np.uint8:
        return inputs.astype(np.float32) / np.float32(255)
    return inputs.astype(np.float32, copy=False)


def cache_folder() -> Path:
    """Return the folder in which ``fedsieve data get`` keeps data sets."""
    if own := os.environ.get("FEDSIEVE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedsieve"


def load(name: str) -> Dataset:
    """Read a data set by name, .npz file, folder of IDX files, or ``package.module:function`` returning a Dataset."""
    path = Path(name)
    if path.suffix == ".npz":
        return _read_npz(path)
    if ":" in name:
        return _call(name)
    if "/" in name:
        return _read_idx_folder(path)
    tried = []
    for candidate in (SHIPPED_FOLDER / f"{name}.npz", cache_folder() / f"{name}.npz"):
        if candidate.exists():
            return _read_npz(candidate)
        tried.append(candidate)
    for folder in (cache_folder() / name, *(system / name for system in _SYSTEM_FOLDERS)):
        if (folder / _IDX_FILES["train_inputs"]).exists():
            return _read_idx_folder(folder)
        tried.append(folder)
    places = "\n  ".join(str(place) for place in tried)
    raise DatasetError(
        f"no data set {name!r}; looked at\n  {places}\n"
        f"Get it with 'fedsieve data get {name}', or name a path: dataset=/path/to/data.npz"
    )


def _read_npz(path: Path) -> Dataset:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = _IDX_FILES.keys() - set(arrays.files)
            if missing:
                raise DatasetError(f"{path} lacks {', '.join(sorted(missing))}; a data set has {', '.join(_IDX_FILES)}")
            found = {name: arrays[name] for name in _IDX_FILES}
    except FileNotFoundError:
        raise DatasetError(f"no data set at {path}: give the path of an existing .npz file") from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    return Dataset(
        train_inputs=_narrow(found["train_inputs"]),
        train_targets=found["train_targets"].astype(np.int64),
        test_inputs=_narrow(found["test_inputs"]),
        test_targets=found["test_targets"].astype(np.int64),
    )


def _narrow(inputs: NDArray[Any]) -> NDArray[Any]:
    return inputs.astype(np.float32) if inputs.dtype == np.float64 else inputs


def _read_idx_folder(folder: Path) -> Dataset:
    arrays = {name: _read_idx(folder / file) for name, file in _IDX_FILES.items()}
    return Dataset(
        train_inputs=arrays["train_inputs"],
        train_targets=arrays["train_targets"].astype(np.int64),
        test_inputs=arrays["test_inputs"],
        test_targets=arrays["test_targets"].astype(np.int64),
    )


def _read_idx(path: Path) -> NDArray[np.uint8]:
    try:
        with gzip.open(path) as file:
            data = file.read()
        zeros, kind, dimensions = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{dimensions}I", data, 4)
        if zeros != 0 or kind != 8:
            raise ValueError("not an IDX file of bytes")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except FileNotFoundError:
        raise DatasetError(f"no file {path}: a folder of IDX files holds {', '.join(_IDX_FILES.values())}") from None
    except (OSError, ValueError, struct.error, EOFError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error


def _call(name: str) -> Dataset:
    module, _, attribute = name.partition(":")
    try:
        function: Callable[[], object] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DatasetError(f"cannot load data set {name!r}: {error}; is its folder on PYTHONPATH?") from error
    dataset = function()
    if not isinstance(dataset, Dataset):
        raise DatasetError(f"expected {name} to return a common.datasets.Dataset, got {type(dataset).__name__}")
    return dataset
