"""Each model of the papers on data in its own format, through a whole private run."""

import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from common import brown, cifar, datasets
from common.datasets import SHIPPED_FOLDER, Dataset
from server.runlog import read_events
from simulations.run import Engine, simulate
from tests.common.test_readers import BAD, GOOD, HEADER
from tests.support import small_config

_TEXT = "green/jj tree/nn grows/vb quiet/jj river/nn small/jj boat/nn drifts/vb old/jj wall/nn "


def small_corpus() -> Dataset:
    """Return samples of a text that says the same thing again and again, in the corpus' own format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "brown.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("brown/ca01", _TEXT * 60)
        return Dataset(**brown.read(path, vocabulary=10))


def _run(out: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = {"rounds": 1, "sites": 2, "steps_per_round": 1, "sampling_rate": 0.5, "epsilon": 50.0}
    result = simulate(small_config(out, **{**settings, **changes}), Engine(in_process=True))
    events = list(read_events(result.folder / "run.jsonl"))
    assert next(event["admitted"] for event in events if event["event"] == "round") == 2
    return events[0], events[-1]


def test_logistic_regression_on_loans(tmp_path: Path) -> None:
    path = tmp_path / "loans.csv"
    path.write_text("\n".join([HEADER, *[GOOD, BAD] * 50]) + "\n")
    settings = {"model": "logistic-regression:20", "rounds": 15, "learning_rate": 2.0, "final_density": 1.0}
    _, end = _run(tmp_path / "out", dataset=f"{path}#class", **settings)
    assert end["accuracy"] == 1.0


def test_linear_regression_on_loans_by_measurements(tmp_path: Path) -> None:
    path = tmp_path / "loans.csv"
    path.write_text("\n".join([HEADER, *[GOOD, BAD] * 50]) + "\n")
    settings = {"model": "linear-regression:20", "method": "compressive", "final_density": 0.24, "measurements": 20}
    learning = {"rounds": 30, "sampling_rate": 1.0, "learning_rate": 0.1, "entry_bound": 1.0, "epsilon": 1e5}
    start, end = _run(tmp_path / "out", dataset=str(path), **settings, **learning)
    assert end["loss"] < 0.5 * start["initial_loss"]
    assert end["uplink"]["index"] == 0 and start["published_epsilon"] < end["epsilon"]


def test_word_embeddings_learn_which_words_stand_together(tmp_path: Path) -> None:
    start, end = _run(
        tmp_path,
        dataset="tests.simulations.test_models_and_data:small_corpus",
        model="cbow:10-6",
        method="select-exponential",
        final_density=0.5,
        pick_epsilon=1.0,
        epsilon=1e4,
        rounds=15,
        steps_per_round=4,
        learning_rate=5.0,
    )
    assert end["accuracy"] > start["initial_accuracy"] + 0.1
    assert end["uplink"]["index"] > 0


class QuickStart(nn.Module):
    """The network of Flower's quick-start tutorial with PyTorch, as it stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def small_photographs() -> Dataset:
    """Return coloured pictures whose class shows in their first channel."""
    rng = np.random.default_rng(0)
    targets = np.arange(200) % 10
    pictures = rng.random((200, 3, 32, 32), np.float32)
    pictures[:, 0] *= targets[:, None, None] / 5
    return Dataset(pictures, targets, pictures[:50], targets[:50])


def one_convolution() -> nn.Module:
    """Return a network for grey pictures that begins as most do."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 4 * 4, 10)
    )


@pytest.mark.parametrize(
    ("model", "dataset"), [("QuickStart", f"{__name__}:small_photographs"), ("one_convolution", "fashion-mnist-12k")]
)
def test_other_peoples_networks_train_unchanged(tmp_path: Path, model: str, dataset: str) -> None:
    start, end = _run(tmp_path, model=f"{__name__}:{model}", dataset=dataset, learning_rate=0.2, epsilon=1e4)
    assert end["loss"] < start["initial_loss"]


def test_h_cnn_s_on_scattering_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kymatio", reason="scattering features need the extra 'scattering'")
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path))
    whole = datasets.load(str(SHIPPED_FOLDER / "fashion-mnist-12k.npz"))
    np.savez(
        tmp_path / "few.npz",
        train_inputs=whole.train_inputs[:40],
        train_targets=whole.train_targets[:40],
        test_inputs=whole.test_inputs[:10],
        test_targets=whole.test_targets[:10],
    )
    start, end = _run(tmp_path / "out", dataset="few+scattering", model="h-cnn-s")
    assert start["parameters"] == 33_066
    assert end["loss"] != start["initial_loss"]


def test_dp_cnn_on_cifar_shaped_pictures(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in (*cifar.TRAIN_FILES, cifar.TEST_FILE):
        classes = rng.integers(0, 10, (4, 1), dtype=np.uint8)
        pictures = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        (tmp_path / name).write_bytes(np.concatenate([classes, pictures], axis=1).tobytes())
    start, end = _run(tmp_path / "out", dataset=str(tmp_path), model="dp-cnn", final_density=0.1)
    assert start["parameters"] == 550_570
    assert end["loss"] != start["initial_loss"]
