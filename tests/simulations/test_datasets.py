import gzip
import hashlib
from pathlib import Path

import pytest

from common.datasets import SHIPPED_FOLDER, load
from common.errors import DatasetError
from simulations import datasets

FILES = {f"{name}.gz": f"contents of {name}".encode() for name in ("a", "b")}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(gzip.compress(content))
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setitem(datasets.CONTENTS, "toy", digests)
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path / "new" / "cache"))
    return folder


def quiet(_: str) -> None:
    pass


def test_files_are_fetched_verified_and_kept(source: Path) -> None:
    said: list[str] = []
    folder = datasets.get("toy", str(source), said.append)
    assert {p.name: gzip.decompress(p.read_bytes()) for p in folder.iterdir()} == FILES
    assert datasets.get("toy", "/nowhere", said.append) == folder  # nothing is fetched a second time
    told = ("fetched, verified", "already here, verified")
    assert said == [f"{folder / name}: {what}" for what in told for name in FILES]
    (folder / "b.gz").write_bytes(gzip.compress(b"damaged"))
    datasets.get("toy", str(source), quiet)
    assert gzip.decompress((folder / "b.gz").read_bytes()) == FILES["b.gz"], "what is wrong is fetched again"


def test_over_http_urls(source: Path) -> None:
    assert datasets.get("toy", source.as_uri(), quiet).name == "toy"


def test_a_wrong_file_does_not_reach_the_cache(source: Path) -> None:
    (source / "b.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DatasetError, match=r"b.gz from .* has SHA-256"):
        datasets.get("toy", str(source), quiet)
    (source / "b.gz").write_bytes(b"not even gzip")
    with pytest.raises(DatasetError, match="not a gzip file"):
        datasets.get("toy", str(source), quiet)
    assert [p.name for p in (source.parent / "new" / "cache" / "toy").iterdir()] == ["a.gz"]


def test_what_cannot_be_fetched(source: Path) -> None:
    with pytest.raises(DatasetError, match=r"cannot fetch /nowhere/a.gz.*apt-get install dataset-fashion-mnist"):
        datasets.get("toy", "/nowhere", quiet)
    with pytest.raises(DatasetError, match="do not know how to get 'cifar'"):
        datasets.get("cifar", None, quiet)


def test_the_shipped_data_can_be_put_into_the_cache(source: Path) -> None:
    assert datasets.get("fashion-mnist-12k", None, quiet).is_relative_to(source.parent / "new" / "cache")
    said: list[str] = []
    copy = datasets.get("fashion-mnist-12k", None, said.append)
    assert said == [f"{copy}: copied from {SHIPPED_FOLDER / copy.name}"]
    assert copy.read_bytes() == (SHIPPED_FOLDER / "fashion-mnist-12k.npz").read_bytes()


def test_the_full_set_where_it_is_installed() -> None:
    folder = Path("/usr/share/datasets/fashion-mnist")
    if not folder.exists():
        pytest.skip("the full Fashion-MNIST is not here: apt-get install dataset-fashion-mnist")
    for file, digest in datasets.CONTENTS["fashion-mnist"].items():
        assert datasets._content_digest(folder / file) == digest
    assert load("fashion-mnist").train_inputs.shape == (60_000, 1, 28, 28)
