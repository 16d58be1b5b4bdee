"""Readers of real data sets: on small files in the same format, and on the real ones where they are."""

import gzip
import io
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from common import brown, cifar, datasets, lending_club
from common.datasets import Dataset
from common.errors import DatasetError
from common.scattering import scattered

HEADER = (
    "funded_amnt,term,int_rate,sub_grade,addr_state,verification_status,annual_inc,emp_length,delinq_2yrs,"
    "inq_last_6mths,revol_util,acc_now_delinq,open_il_6m,open_il_12m,open_il_24m,total_bal_il,all_util,inq_fi,"
    "inq_last_12m,delinq_amnt,num_il_tl,total_il_high_credit_limit,Class"
)
GOOD = "16100,term_36,13.99,C4,CT,Not_Verified,35000.0,emp_5,0,0,67.4,0,1,0,0,1099,48,0,3,0,3,13193,good"
BAD = "40000,term_60,7.5,A4,WY,Verified,9999999,emp_ge_10,0,0,10,0,5,1,3,49187,77,0,0,0,9,65945,bad"


def _real(name: str) -> Dataset:
    try:
        return datasets.load(name)
    except DatasetError as error:
        pytest.skip(f"{name} is not on this machine (put it into FEDSIEVE_CACHE): {str(error).splitlines()[0]}")


def _loans(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "loans.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_loans_are_features_in_the_unit_interval_and_a_rate(tmp_path: Path) -> None:
    path = _loans(tmp_path, *[GOOD, BAD] * 10)
    dataset = datasets.load(str(path))
    assert dataset.train_inputs.shape == (16, lending_club.FEATURES)
    assert dataset.test_inputs.shape == (4, 20)
    assert dataset.train_targets.dtype == np.float32
    assert {round(float(rate), 3) for rate in dataset.train_targets} == {1.399, 0.75}
    assert dataset.train_inputs.min() >= 0 and dataset.train_inputs.max() == 1
    classes = datasets.load(f"{path}#class")
    assert classes.train_targets.dtype == np.int64
    assert np.array_equal(classes.train_targets == 1, dataset.train_targets < 1)  # the bad loan is the cheaper one


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (GOOD.replace("term_36", "term_48"), "term"),
        (GOOD.replace("35000.0", "much"), "annual_inc"),
        (GOOD.replace("35000.0", "nan"), "annual_inc"),
    ],
)
def test_bad_loans_are_named(tmp_path: Path, row: str, expected: str) -> None:
    with pytest.raises(DatasetError, match=expected):
        datasets.load(str(_loans(tmp_path, GOOD, row)))


def test_other_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="lacks the columns term"):
        datasets.load(str(_loans(tmp_path, "1,2", header="a,b")))
    with pytest.raises(DatasetError, match="no file"):
        datasets.load(str(tmp_path / "absent.csv"))
    (tmp_path / "latin.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(DatasetError, match=r"cannot read .*latin.csv"):
        datasets.load(str(tmp_path / "latin.csv"))
    with pytest.raises(DatasetError, match="int_rate, class"):
        datasets.load(f"{_loans(tmp_path, GOOD)}#sub_grade")


def _corpus(path: Path, texts: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return path


def test_words_become_samples(tmp_path: Path) -> None:
    text = "\n\tThe/at cat/nn saw/vbd a/at dog/nn ./. Dog/nn Dog/nn saw/vbd cat/nn 12/cd\n"
    path = _corpus(tmp_path / "brown.zip", {"brown/ca01": text, "brown/README": "cat/nn " * 99})
    samples = brown.read(path, vocabulary=3)
    # dog 3, cat 2, saw 2 (ties by the alphabet): the text is cat saw dog dog dog saw cat.
    everything = np.concatenate([samples["train_inputs"], samples["test_inputs"]])
    assert everything.shape == (2 * (6 + 5), brown.WORDS_PER_RECORD)
    assert everything.min() >= 0 and everything.max() <= 2
    pairs = {tuple(pair) for pair in everything[:, :2].astype(int).tolist()}
    cat, dog, saw = 1, 0, 2
    assert pairs == {(cat, saw), (saw, cat), (saw, dog), (dog, saw), (cat, dog), (dog, cat), (dog, dog)}
    assert not samples["train_targets"].any()
    again = brown.read(path, vocabulary=3)
    assert np.array_equal(again["train_inputs"], samples["train_inputs"])


def test_other_archives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not the Brown corpus"):
        datasets.load(str(_corpus(tmp_path / "other.zip", {"readme": "x"})))
    (tmp_path / "broken.zip").write_bytes(b"no zip")
    with pytest.raises(DatasetError, match="cannot read"):
        datasets.load(str(tmp_path / "broken.zip"))
    with pytest.raises(DatasetError, match="different words"):
        datasets.load(str(_corpus(tmp_path / "short.zip", {"brown/ca01": "cat/nn"})))
    with pytest.raises(DatasetError, match=r"no file .*absent.zip"):
        datasets.load(str(tmp_path / "absent.zip"))
    apart = _corpus(tmp_path / "apart.zip", {"brown/ca01": "cat/nn", "brown/ca02": "dog/nn"})
    with pytest.raises(DatasetError, match="gives 0 pairs of words"):
        brown.read(apart, vocabulary=2)
    together = _corpus(tmp_path / "together.zip", {"brown/ca01": "cat/nn dog/nn"})
    assert [len(part) for part in brown.read(together, vocabulary=2).values()] == [1, 1, 1, 1]


def _cifar_files(rng: np.random.Generator) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """Return the six files of the official binary version with 4 records each, and what the first one holds."""
    pictures = rng.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
    classes = rng.integers(0, 10, (6, 4, 1), dtype=np.uint8)
    names = [*cifar.TRAIN_FILES, cifar.TEST_FILE]
    records = np.concatenate([classes, pictures], axis=2)
    return {name: records[i].tobytes() for i, name in enumerate(names)}, pictures[0], classes[0, :, 0]


def test_cifar_is_read_from_its_folder_and_from_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, pictures, classes = _cifar_files(np.random.default_rng(0))
    folder = tmp_path / "cifar-10"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    dataset = datasets.load(str(folder))
    assert dataset.train_inputs.shape == (20, 3, 32, 32) and dataset.train_inputs.dtype == np.uint8
    assert np.array_equal(dataset.train_inputs[:4, 1, 2, 3], pictures[:, 1024 + 2 * 32 + 3])
    assert dataset.train_targets[:4].tolist() == classes.tolist()
    assert len(dataset.test_inputs) == 4
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path))
    assert np.array_equal(datasets.load("cifar-10").train_inputs, dataset.train_inputs)


def test_damaged_cifar_is_refused(tmp_path: Path) -> None:
    files, *_ = _cifar_files(np.random.default_rng(0))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "data_batch_2.bin").write_bytes(files["data_batch_2.bin"][:-1])
    with pytest.raises(DatasetError, match=r"data_batch_2\.bin to hold records of 3073 bytes"):
        datasets.load(str(tmp_path))
    (tmp_path / "data_batch_2.bin").write_bytes(b"\x0b" + files["data_batch_2.bin"][1:])
    with pytest.raises(DatasetError, match="classes below 10"):
        datasets.load(str(tmp_path))
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(DatasetError, match=r"data_batch_2\.bin"):
        datasets.load(str(tmp_path))
    archive = tmp_path / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tmp_path / "data_batch_1.bin", "data_batch_1.bin")
    with pytest.raises(DatasetError, match=r"cifar.tar.gz lacks data_batch_2\.bin, .*test_batch\.bin: expected"):
        cifar.read(archive)
    archive.write_bytes(b"no archive")
    with pytest.raises(DatasetError, match=r"cannot read .*cifar.tar.gz"):
        cifar.read(archive)


def _idx(array: np.ndarray) -> bytes:
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_found_by_name_packed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    for part, count in (("train", 6), ("t10k", 2)):
        arrays = {
            f"{part}-images-idx3-ubyte": rng.integers(0, 256, (count, 28, 28), dtype=np.uint8),
            f"{part}-labels-idx1-ubyte": np.arange(count, dtype=np.uint8),
        }
        for name, array in arrays.items():
            data = _idx(array)
            (tmp_path / "mnist" / (f"{name}.gz" if packed else name)).write_bytes(
                gzip.compress(data) if packed else data
            )
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path))
    dataset = datasets.load("mnist")
    assert dataset.train_inputs.shape == (6, 1, 28, 28)
    assert dataset.test_targets.tolist() == [0, 1]


def test_scattering_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kymatio", reason="scattering features need the extra 'scattering'")
    pictures = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    features = scattered(pictures, tmp_path)
    assert features.shape == (3, 81, 7, 7) and features.dtype == np.float32
    assert not np.array_equal(scattered(pictures[:2, ::-1], tmp_path), features[:2])
    # Order 0 is a blurred, smaller picture: its mean is nearly that of the picture, whose scale is [0, 1].
    assert features[:, 0].mean() == pytest.approx((pictures / 255).mean(), rel=0.05)
    monkeypatch.setattr("common.scattering._transform", lambda pictures: pytest.fail("computed twice"))
    assert np.array_equal(scattered(pictures, tmp_path), features)
    with pytest.raises(DatasetError, match="one channel"):
        scattered(np.zeros((1, 3, 32, 32), np.uint8), tmp_path)


def test_scattering_of_nothing_is_nothing_and_needs_kymatio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kymatio", reason="scattering features need the extra 'scattering'")
    assert scattered(np.zeros((0, 28, 28), np.uint8), tmp_path / "not" / "there").shape == (0, 81, 7, 7)
    kept = next(tmp_path.rglob("*.npy"))
    np.save(kept, np.array([print], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        scattered(np.zeros((0, 28, 28), np.uint8), tmp_path / "not" / "there")
    monkeypatch.setitem(sys.modules, "kymatio.numpy", None)
    with pytest.raises(DatasetError, match="need the package kymatio"):
        scattered(np.zeros((1, 28, 28), np.uint8), tmp_path)


def test_scattering_of_a_named_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kymatio", reason="scattering features need the extra 'scattering'")
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path))
    pictures = np.zeros((2, 28, 28), np.uint8)
    np.savez(
        tmp_path / "tiny.npz",
        train_inputs=pictures,
        train_targets=np.array([0, 1]),
        test_inputs=pictures,
        test_targets=np.array([0, 1]),
    )
    assert datasets.load("tiny+scattering").test_inputs.shape == (2, 81, 7, 7)


def test_targets_are_classes_or_numbers(tmp_path: Path) -> None:
    inputs = np.zeros((2, 3), np.float32)
    np.savez(
        tmp_path / "numbers.npz",
        train_inputs=inputs,
        train_targets=np.array([0.25, 1.5]),
        test_inputs=inputs,
        test_targets=np.array([0.0, 1.0]),
    )
    assert datasets.load(str(tmp_path / "numbers.npz")).train_targets.tolist() == [0.25, 1.5]
    with pytest.raises(DatasetError, match="int64 or float32, got complex"):
        Dataset(inputs, np.zeros(2, complex), inputs, np.zeros(2, np.int64))


def test_the_real_loans() -> None:
    dataset = _real("lending-club")
    assert (len(dataset.train_inputs), len(dataset.test_inputs)) == (7886, 1971)
    ones = np.ones((len(dataset.train_inputs), 1))
    design = np.concatenate([dataset.train_inputs, ones], axis=1).astype(np.float64)
    weights = np.linalg.lstsq(design, dataset.train_targets)[0]
    left = np.mean((design @ weights - dataset.train_targets) ** 2)
    assert left < 0.6 * dataset.train_targets.var()  # the features explain much of the rate


def test_the_real_corpus() -> None:
    dataset = _real("brown")
    assert dataset.train_inputs.shape == (200_000, 10)
    assert dataset.train_inputs.max() == brown.VOCABULARY - 1


def test_the_real_digits() -> None:
    dataset = _real("mnist")
    assert dataset.train_inputs.shape == (60_000, 1, 28, 28)
    assert np.bincount(dataset.test_targets).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
