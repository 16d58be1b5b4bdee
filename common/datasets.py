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

from common import brown, cifar, lending_club
from common.errors import DatasetError
from common.scattering import scattered

SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "simulations" / "data"
_IDX_FILES = {
    "train_inputs": "train-images-idx3-ubyte.gz",
    "train_targets": "train-labels-idx1-ubyte.gz",
    "test_inputs": "t10k-images-idx3-ubyte.gz",
    "test_targets": "t10k-labels-idx1-ubyte.gz",
}
_SCATTERING = "+scattering"
# Names of files that the cache folder may hold, beside .npz files and folders: name, file, what follows '#'.
_NAMED_FILES = {
    "brown": ("brown.zip", ""),
    "lending-club": ("lending_club.csv", "int_rate"),
    "lending-club-class": ("lending_club.csv", "class"),
    "cifar-10": ("cifar-10-binary.tar.gz", ""),
}
_SYSTEM_FOLDERS = (Path("/usr/share/datasets"), Path("/usr/local/share/datasets"))


@dataclass(frozen=True, slots=True)
class Dataset:
    """Records to train on (split among the sites of a simulation) and the server's own test set.

    Inputs are float32, or uint8 pictures that ``as_floats`` scales to [0, 1]; grey ones, (records, height, width), are
    given the channel that convolutions expect. Targets are classes (int64) or, for
    regression, numbers (float32). No statistic of the data is ever used.
    """

    train_inputs: NDArray[Any]
    train_targets: NDArray[Any]
    test_inputs: NDArray[Any]
    test_targets: NDArray[Any]

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            inputs, targets = getattr(self, f"{part}_inputs"), getattr(self, f"{part}_targets")
            if inputs.dtype == np.uint8 and inputs.ndim == 3:
                object.__setattr__(self, f"{part}_inputs", inputs[:, None])
            if inputs.dtype not in (np.uint8, np.float32):
                raise DatasetError(f"expected {part} inputs of dtype uint8 or float32, got {inputs.dtype}")
            if targets.dtype not in (np.int64, np.float32):
                raise DatasetError(f"expected {part} targets of dtype int64 or float32, got {targets.dtype}")
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
    """Read a data set by name, by path, or from ``package.module:function`` that returns a Dataset.

    A path is that of an .npz file, of a folder of IDX files (MNIST and its kin) or of CIFAR-10's .bin files, of
    CIFAR-10's archive (.tar.gz), of the Brown corpus (.zip), or of Lending Club's loans (.csv for their interest rate,
    .csv#class to tell bad loans from good ones). ``NAME+scattering`` replaces pictures by their scattering features.
    """
    if name.endswith(_SCATTERING):
        plain = load(name.removesuffix(_SCATTERING))
        features = (scattered(pictures, cache_folder()) for pictures in (plain.train_inputs, plain.test_inputs))
        return Dataset(next(features), plain.train_targets, next(features), plain.test_targets)
    if (own := _read_path(name)) is not None:
        return own
    tried = []
    for candidate in (SHIPPED_FOLDER / f"{name}.npz", cache_folder() / f"{name}.npz"):
        if candidate.exists():
            return _read_npz(candidate)
        tried.append(candidate)
    if name in _NAMED_FILES:
        file, target = _NAMED_FILES[name]
        if (cache_folder() / file).exists():
            return _read_file(cache_folder() / file, target)
        tried.append(cache_folder() / file)
    for folder in (cache_folder() / name, *(system / name for system in _SYSTEM_FOLDERS)):
        if cifar.is_cifar(folder) or _idx_path(folder, "train_inputs").exists():
            return _read_folder(folder)
        tried.append(folder)
    places = "\n  ".join(str(place) for place in tried)
    raise DatasetError(
        f"no data set {name!r}; looked at\n  {places}\n"
        f"Get it with 'fedsieve data get {name}', put it there, or name a path: dataset=/path/to/data.npz"
    )


def _read_path(name: str) -> Dataset | None:
    """Read a data set that is named by a path or a function; None where ``name`` is neither."""
    path, _, target = name.partition("#")
    if path.endswith(".npz"):
        return _read_npz(Path(path))
    if path.endswith((".csv", ".zip", ".tar.gz")):
        return _read_file(Path(path), target)
    if ":" in name:
        return _call(name)
    return _read_folder(Path(name)) if "/" in name else None


def _read_file(path: Path, target: str) -> Dataset:
    if path.suffix == ".csv":
        return Dataset(**lending_club.read(path, target or "int_rate"))
    return Dataset(**(brown.read(path) if path.suffix == ".zip" else cifar.read(path)))


def _read_folder(folder: Path) -> Dataset:
    return Dataset(**cifar.read(folder)) if cifar.is_cifar(folder) else _read_idx_folder(folder)


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
        train_targets=_classes_or_numbers(found["train_targets"]),
        test_inputs=_narrow(found["test_inputs"]),
        test_targets=_classes_or_numbers(found["test_targets"]),
    )


def _narrow(inputs: NDArray[Any]) -> NDArray[Any]:
    return inputs.astype(np.float32) if inputs.dtype == np.float64 else inputs


def _classes_or_numbers(targets: NDArray[Any]) -> NDArray[Any]:
    if targets.dtype.kind not in "iufb":
        raise DatasetError(f"expected targets that are classes, whole numbers from 0, or numbers, got {targets.dtype}")
    return targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64)


def _read_idx_folder(folder: Path) -> Dataset:
    arrays = {name: _read_idx(_idx_path(folder, name)) for name in _IDX_FILES}
    return Dataset(
        train_inputs=arrays["train_inputs"],
        train_targets=arrays["train_targets"].astype(np.int64),
        test_inputs=arrays["test_inputs"],
        test_targets=arrays["test_targets"].astype(np.int64),
    )


def _idx_path(folder: Path, part: str) -> Path:
    """Return the file of a part: packed, or, where there is only that, as it was before it was packed."""
    packed = folder / _IDX_FILES[part]
    plain = packed.with_suffix("")
    return plain if plain.exists() and not packed.exists() else packed


def _read_idx(path: Path) -> NDArray[np.uint8]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
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
