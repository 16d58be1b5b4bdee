"""Getting data sets: downloaded only when asked for, checked, and kept in the cache folder."""

import gzip
import hashlib
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from common.datasets import SHIPPED_FOLDER, cache_folder
from common.errors import DatasetError

_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"
_FASHION_MNIST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

# SHA-256 of the uncompressed contents: the same pictures are packed differently in different places.
CONTENTS: dict[str, dict[str, str]] = {
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    "mnist": {
        "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
}
SOURCES: dict[str, str] = {"fashion-mnist": _FASHION_MNIST, "mnist": _MNIST}


def get(name: str, source: str | None = None, report: Callable[[str], None] = print) -> Path:
    """Bring a data set into the cache folder and return where it is; files that are there and right are kept.

    The data that ships with a checkout is copied: Flower's bundle of the app leaves it behind.

    ``source`` is the URL or folder to take the files from, instead of the data set's home.
    Guarantees: a file reaches the cache only if its contents have the known SHA-256.
    """
    if (shipped := SHIPPED_FOLDER / f"{name}.npz").exists():
        target = cache_folder() / shipped.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shipped, target)
        report(f"{target}: copied from {shipped}")
        return target
    if name not in CONTENTS:
        raise DatasetError(f"do not know how to get {name!r}: expected one of {', '.join(CONTENTS)}")
    folder = cache_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, digest in CONTENTS[name].items():
        target = folder / file
        if target.exists() and _content_digest(target) == digest:
            report(f"{target}: already here, verified")
            continue
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fetched = Path(scratch) / file
            _fetch(f"{source or SOURCES[name]}/{file}", fetched)
            found = _content_digest(fetched)
            if found != digest:
                raise DatasetError(f"{file} from {source or SOURCES[name]} has SHA-256 {found}, expected {digest}")
            fetched.replace(target)
        report(f"{target}: fetched, verified")
    return folder


def _fetch(address: str, target: Path) -> None:
    try:
        if "://" not in address:
            shutil.copyfile(address, target)
            return
        with urllib.request.urlopen(address, timeout=60) as response, target.open("wb") as file:
            shutil.copyfileobj(response, file)
    except (OSError, urllib.error.URLError) as error:
        raise DatasetError(
            f"cannot fetch {address}: {error}; name a folder that has the files with --source (those of Fashion-MNIST "
            "come with Debian's 'apt-get install dataset-fashion-mnist')"
        ) from error


def _content_digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with gzip.open(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except (OSError, EOFError):
        return "(not a gzip file)"
    return digest.hexdigest()
