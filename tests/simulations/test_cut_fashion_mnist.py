"""The cut of Fashion-MNIST that ships with the repository can be made again."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from simulations.data import cut_fashion_mnist
from simulations.data.cut_fashion_mnist import cut


def test_a_cut_has_as_many_of_every_class_each_once_and_is_the_same_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = SimpleNamespace(
        train_inputs=np.arange(3 * 1201, dtype=np.int32).reshape(-1, 1, 1),
        train_targets=np.arange(3 * 1201) % 3,
        test_inputs=-np.arange(3 * 201, dtype=np.int32).reshape(-1, 1, 1),
        test_targets=np.arange(3 * 201) % 3,
    )
    monkeypatch.setattr(cut_fashion_mnist, "load", {"where": full}.__getitem__)
    files = []
    for name in ("a.npz", "b.npz"):
        monkeypatch.setattr(cut_fashion_mnist, "TARGET", tmp_path / name)
        cut_fashion_mnist.main("where")
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    assert "b.npz: 3600 + 600 pictures, " in capsys.readouterr().out
    rng = np.random.default_rng(20170825)
    with np.load(tmp_path / "a.npz") as arrays:
        for part, count in (("train", 1200), ("test", 200)):
            inputs, targets = arrays[f"{part}_inputs"], arrays[f"{part}_targets"]
            assert np.bincount(targets).tolist() == [count] * 3 and targets.dtype == np.uint8
            assert (np.abs(inputs[:, 0, 0]) % 3 == targets).all() and len(np.unique(inputs)) == 3 * count
            assert (np.diff(targets.astype(int)) != 0).mean() > 0.5, "in a random order"
            wanted, _ = cut(getattr(full, f"{part}_inputs"), getattr(full, f"{part}_targets"), count, rng)
            assert (inputs == wanted).all()
