import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from common import datasets
from common.datasets import Dataset, as_floats, load
from common.errors import DatasetError


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    with gzip.open(path, "wb") as file:
        file.write(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name, array in {
        "train-images-idx3-ubyte.gz": np.arange(4 * 9).reshape(4, 3, 3),
        "train-labels-idx1-ubyte.gz": np.array([0, 1, 0, 1]),
        "t10k-images-idx3-ubyte.gz": np.zeros((2, 3, 3)),
        "t10k-labels-idx1-ubyte.gz": np.array([1, 0]),
    }.items():
        write_idx(folder / name, array)
    return folder


def test_the_shipped_data() -> None:
    data = load("fashion-mnist-12k")
    assert data.train_inputs.shape == (12_000, 1, 28, 28) and data.train_inputs.dtype == np.uint8
    assert data.test_inputs.shape == (2_000, 1, 28, 28)
    assert np.bincount(data.train_targets).tolist() == [1200] * 10
    assert np.bincount(data.test_targets).tolist() == [200] * 10


def test_idx_folder_by_path_and_from_the_cache(idx_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_CACHE", str(idx_folder.parent))
    for name in (str(idx_folder), "tiny"):
        data = load(name)
        assert data.train_inputs[1, 0, 0].tolist() == [9, 10, 11]
        assert data.train_targets.tolist() == [0, 1, 0, 1]


def test_npz_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    arrays = {
        "train_inputs": np.ones((3, 2)),
        "train_targets": np.zeros(3, np.uint8),
        "test_inputs": np.ones((1, 2)),
        "test_targets": np.zeros(1, np.uint8),
    }
    np.savez(path, **arrays)
    data = load(str(path))
    assert data.train_inputs.dtype == np.float32 and data.train_targets.dtype == np.int64
    grey = np.ones((1, 4, 5), np.uint8)  # pictures get a channel, wherever they come from; numbers may be anything
    assert Dataset(grey, data.test_targets, grey.astype(np.float32), data.test_targets).train_inputs.shape == (
        1,
        1,
        4,
        5,
    )
    assert Dataset(grey, data.test_targets, grey.astype(np.float32), data.test_targets).test_inputs.shape == (1, 4, 5)
    del arrays["test_inputs"]
    np.savez(path, **arrays)
    with pytest.raises(DatasetError, match="lacks test_inputs"):
        load(str(path))


def test_function() -> None:
    assert len(load("tests.support:small_dataset").train_inputs) == 240
    with pytest.raises(DatasetError, match=r"return a common\.datasets\.Dataset, got dict"):
        load("builtins:dict")
    with pytest.raises(DatasetError, match="cannot load data set"):
        load("no.such:thing")


def test_a_missing_data_set_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path))
    with pytest.raises(DatasetError, match=r"fedsieve data get cifar-10") as error:
        load("cifar-10")
    assert str(tmp_path / "cifar-10") in str(error.value)
    with pytest.raises(DatasetError, match="no data set at"):
        load("/nowhere/data.npz")
    with pytest.raises(DatasetError, match="no file"):
        load("/nowhere/at/all")


@pytest.mark.parametrize("damage", ["text", "cut", "not bytes"])
def test_damaged_files_are_named(idx_folder: Path, damage: str) -> None:
    path = idx_folder / "train-images-idx3-ubyte.gz"
    if damage == "text":
        path.write_text("hello")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-12])
    else:
        with gzip.open(path, "wb") as file:
            file.write(struct.pack(">HBBI", 0, 13, 1, 1) + b"abcd")
    with pytest.raises(DatasetError, match=r"cannot read .*train-images"):
        load(str(idx_folder))


def test_damaged_npz(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(b"not a zip")
    with pytest.raises(DatasetError, match="cannot read"):
        load(str(path))


def test_pickles_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    names = ("train_inputs", "train_targets", "test_inputs", "test_targets")
    np.savez(path, **{name: np.array([{"a": 1}], dtype=object) for name in names})
    with pytest.raises(DatasetError, match="cannot read"):
        load(str(path))


def test_inconsistent_arrays_are_refused() -> None:
    inputs, targets = np.zeros((3, 2), np.float32), np.zeros(3, np.int64)
    with pytest.raises(DatasetError, match="as many train inputs as targets"):
        Dataset(inputs, targets[:2], inputs, targets)
    with pytest.raises(DatasetError, match="dtype uint8 or float32"):
        Dataset(inputs.astype(int), targets, inputs, targets)
    with pytest.raises(DatasetError, match="at least one record"):
        Dataset(inputs[:0], targets[:0], inputs, targets)


def test_pixels_become_zero_to_one() -> None:
    assert as_floats(np.array([0, 51, 255], np.uint8)).tolist() == pytest.approx([0, 0.2, 1])
    already = np.array([2.5], np.float32)
    assert as_floats(already) is already


def test_nothing_is_downloaded_from_here() -> None:
    assert not {"urllib", "requests", "socket"} & set(vars(datasets))
