"""Measuring and recovering sparse vectors."""

import hashlib
from itertools import combinations

import numpy as np
import pytest

from common.compressive import Measurement, enough_rows, largest_entries, recover
from common.errors import ConfigError
from simulations.benchmarks.methods import cost_of


def _dense(measurement: Measurement) -> np.ndarray:
    return measurement.columns().T.astype(np.float64) * measurement.scale  # Psi, (rows, size)


def test_the_matrix_is_the_same_on_every_machine() -> None:
    columns = Measurement(seed=7, epoch=2, size=50, rows=12, sparsity=3).columns()
    assert columns[0, :4].tolist() == [-1267.0, -45214.0, 27783.0, -46138.0]
    assert hashlib.sha256(columns.astype("<f4").tobytes()).hexdigest()[:16] == "d750f03dd41fcf3a"
    assert not np.array_equal(columns, Measurement(7, 3, 50, 12, 3).columns())
    assert not columns.flags.writeable  # it is shared
    large = Measurement(seed=7, epoch=2, size=700, rows=100, sparsity=3).columns()  # more than a block of entries
    assert hashlib.sha256(large.astype("<f4").tobytes()).hexdigest()[:16] == "46040a819f228ec7"


def test_the_entries_are_normal() -> None:
    psi = _dense(Measurement(1, 0, 400, 100, 5))
    assert psi.mean() == pytest.approx(0, abs=4 * 0.1 / 200)
    assert psi.std() == pytest.approx(0.1, rel=0.02)
    assert np.mean(np.abs(psi) > 0.2) == pytest.approx(0.0455, abs=0.005)
    assert np.abs(np.corrcoef(psi.T) - np.eye(400)).max() < 0.6


def test_column_bound_is_the_exact_sensitivity() -> None:
    for seed in range(20):
        measurement = Measurement(seed, 0, 23, 20, 5)
        exact = np.abs(_dense(measurement)).sum(0).max()
        assert exact <= measurement.column_bound() <= exact * (1 + 1e-14)
        assert measurement.noise_scale(0.5) == 2 * measurement.column_bound()
    # Few rows: the paper's sqrt(p) is too small for most matrices. Many rows: the exact norm asks for less noise.
    above = sum(Measurement(seed, 0, 23, 20, 5).column_bound() > np.sqrt(20) for seed in range(100))
    assert above > 50
    assert Measurement(0, 0, 200, 2000, 5).column_bound() < 0.9 * np.sqrt(2000)


def test_every_sparse_vector_comes_back() -> None:
    rng = np.random.default_rng(0)
    for case in range(1000):
        sparsity = int(rng.integers(1, 9))
        size = int(rng.integers(4 * sparsity, 400))
        measurement = Measurement(case, 0, size, enough_rows(size, sparsity), sparsity)
        support = np.sort(rng.choice(size, sparsity, replace=False))
        values = (rng.normal(size=sparsity), rng.choice([-1.0, 1.0], sparsity), np.exp(2 * rng.normal(size=sparsity)))
        found, coefficients = recover(measurement, measurement.of(support, values[case % 3]))
        assert np.array_equal(found, support), case
        assert np.allclose(coefficients, values[case % 3], rtol=1e-8), case


def test_recovery_agrees_with_trying_every_support() -> None:
    rng = np.random.default_rng(1)
    for case in range(40):
        measurement = Measurement(case, 1, 12, 11, 2)
        psi = _dense(measurement)
        support = np.sort(rng.choice(12, 2, replace=False))
        measured = measurement.of(support, rng.choice([-1.0, 1.0], 2)) + 0.02 * rng.laplace(size=11)
        fits = {pair: np.linalg.lstsq(psi[:, pair], measured)[0] for pair in combinations(range(12), 2)}
        best = min(fits, key=lambda pair: float(np.linalg.norm(measured - psi[:, pair] @ fits[pair])))
        found, values = recover(measurement, measured)
        assert tuple(found) == best
        assert np.allclose(values, fits[best])


def _textbook(psi: np.ndarray, sparsity: int, measured: np.ndarray) -> np.ndarray:
    """CoSaMP as compressive-laplace's Algorithm 1 has it, line by line."""
    size, z, u = psi.shape[1], np.zeros(psi.shape[1]), measured
    for _ in range(6 * (sparsity + 1)):
        wanted = np.argsort(-np.abs(psi.T @ u))[: 2 * sparsity]
        joined = sorted(set(wanted) | set(np.flatnonzero(z)))
        b = np.zeros(size)
        b[joined] = np.linalg.pinv(psi[:, joined]) @ measured
        z = np.zeros(size)
        kept = np.argsort(-np.abs(b))[:sparsity]
        z[kept] = b[kept]
        u = measured - psi @ z
    return z


def test_recovery_in_noise_beats_the_textbook_on_average() -> None:
    rng = np.random.default_rng(2)
    errors = []
    for case in range(80):
        measurement = Measurement(case, 2, 60, enough_rows(60, 3), 3)
        truth = np.zeros(60)
        truth[np.sort(rng.choice(60, 3, replace=False))] = rng.normal(size=3)
        measured = _dense(measurement) @ truth + 0.1 * rng.laplace(size=measurement.rows)
        found, values = recover(measurement, measured)
        ours = np.zeros(60)
        ours[found] = values
        theirs = _textbook(_dense(measurement), 3, measured)
        errors.append((np.linalg.norm(ours - truth), np.linalg.norm(theirs - truth)))
    assert np.mean(errors, axis=0)[0] < np.mean(errors, axis=0)[1]


def test_recovery_is_much_faster_than_the_textbook() -> None:
    measurement = Measurement(3, 0, 1500, enough_rows(1500, 8), 8)
    rng, psi = np.random.default_rng(3), _dense(Measurement(3, 0, 1500, enough_rows(1500, 8), 8))
    measured = measurement.of(np.arange(0, 800, 100), rng.normal(size=8)) + 0.01 * rng.laplace(size=measurement.rows)
    cost = cost_of("", lambda: recover(measurement, measured), "", lambda: _textbook(psi, 8, measured))
    assert cost.cpu < cost.peer_cpu / 2


def test_edge_cases() -> None:
    measurement = Measurement(0, 0, 30, enough_rows(30, 2), 2)
    _, values = recover(measurement, np.zeros(measurement.rows))
    assert not values.any()
    with pytest.raises(ValueError, match="finite"):
        recover(measurement, np.full(measurement.rows, np.nan))
    assert largest_entries(np.array([1.0, -3.0, 3.0, 2.0]), 2).tolist() == [1, 2]
    assert largest_entries(np.array([1.0, 1.0, 1.0]), 2).tolist() == [0, 1]
    assert largest_entries(np.array([1.0]), 4).tolist() == [0]
    assert largest_entries(np.array([3.0, 1.0, 1.0, 1.0, -5.0]), 4).tolist() == [0, 1, 2, 4]  # of ties only two


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("seed", 0, -1),
        ("seed", 2**63 - 1, 2**63),
        ("epoch", 0, -1),
        ("epoch", 2**32 - 1, 2**32),
        ("sparsity", 1, 0),
        ("sparsity", 12, 13),  # as many as there are measurements
        ("rows", 2, 1),
        ("rows", 2**28 // 32, 2**28 // 32 + 1),
        ("size", 2, 1),
    ],
)
def test_the_last_measurement_that_can_be_made_and_the_first_that_cannot(field: str, inside: int, outside: int) -> None:
    good = {"seed": 0, "epoch": 0, "size": 32, "rows": 12, "sparsity": 2}
    Measurement(**{**good, field: inside})
    with pytest.raises(ConfigError, match="expected"):
        Measurement(**{**good, field: outside})
