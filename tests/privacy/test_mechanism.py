"""The promises of the mechanism: each of these fails when the mechanism is broken."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from client.clipping.book_keeping import ClippedSum
from client.dpsgd import train_round
from client.randomness import OsRandomness, RoundRandomness
from common.models import FlatModel, build, initial_vector
from simulations.seeded import GeneratorRandomness, SeededRandomness
from tests.support import CLASSES, FEATURES, SMALL_MODEL, site_data, small_dataset, small_plan

START = initial_vector(SMALL_MODEL, 3)
KEPT = torch.arange(0, START.size, 2)
DATA = small_dataset()
PHYSICAL_BATCH = 8  # with so many others, a record is alone in a batch of its own
EXTREMES = (0.0, 1.0, -1.0, 1e-30, 1e4, -1e20, 1e38, float("inf"), float("nan"))
# One draw of bytes for ten cases, since a draw for each feature, or case, would take longer than the mechanism itself.
CASES, CASE_BYTES = 10, FEATURES + 2


def cases_of(drawn: bytes) -> list[tuple[tuple[float, ...], int, int]]:
    """Return records, each with its class and how many others there are, of the drawn bytes."""
    cases = []
    for start in range(0, len(drawn), CASE_BYTES):
        *choices, target, others = drawn[start : start + CASE_BYTES]
        record = tuple(EXTREMES[choice % len(EXTREMES)] for choice in choices)
        cases.append((record, target % CLASSES, others % (PHYSICAL_BATCH + 1)))
    return cases


DRAWN = st.binary(min_size=CASES * CASE_BYTES, max_size=CASES * CASE_BYTES).map(cases_of)


def change_by(record: tuple[float, ...], target: int, others: int, dtype: torch.dtype) -> float:
    """Return by how much one record changes the clipped sum, in units of the clip norm."""
    inputs, targets = torch.tensor(DATA.train_inputs[:others], dtype=dtype), torch.tensor(DATA.train_targets[:others])
    with_record = torch.cat([inputs, torch.tensor([record], dtype=dtype)])
    total = _clipped_sum(dtype)(with_record, torch.cat([targets, torch.tensor([target])]))
    return (total - _sum_without(others, dtype)).norm().item() / 0.25


@lru_cache
def _clipped_sum(dtype: torch.dtype) -> ClippedSum:
    return ClippedSum(_model(dtype), KEPT, 0.25, PHYSICAL_BATCH)


@lru_cache
def _sum_without(others: int, dtype: torch.dtype) -> torch.Tensor:
    inputs, targets = torch.tensor(DATA.train_inputs[:others], dtype=dtype), torch.tensor(DATA.train_targets[:others])
    return _clipped_sum(dtype)(inputs, targets)


@lru_cache
def _model(dtype: torch.dtype) -> FlatModel:
    model = FlatModel(build(SMALL_MODEL), dtype=dtype)
    model.load(START)
    return model


@settings(max_examples=10_000 // CASES)
@given(DRAWN)
def test_one_record_changes_the_sum_by_at_most_the_clip_norm(
    cases: list[tuple[tuple[float, ...], int, int]],
) -> None:
    for record, target, others in cases:
        # In double precision, so that what is seen is the mechanism and not the rounding of the sum over the others.
        assert change_by(record, target, others, torch.float64) <= 1 + 1e-6, (record, target, others)


@settings(max_examples=300 // CASES)
@given(DRAWN)
def test_single_precision_adds_rounding_and_nothing_else(cases: list[tuple[tuple[float, ...], int, int]]) -> None:
    for record, target, others in cases:
        assert change_by(record, target, others, torch.float32) <= 1 + 1e-5, (record, target, others)


class _Extreme(torch.nn.Module):
    """Three layers whose scales a server can set as it likes: what one makes tiny another makes large again.

    ``positions`` 1 or 2: where there are two, norms of the middle layer come from products of positions, and cancel.
    """

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 6)
        self.middle = torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, CLASSES)
        self._positions = positions

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        if self._positions == 1:
            return self.last(torch.relu(self.middle(hidden)))
        first, second = self.middle(torch.stack([hidden, hidden * 1.000001], dim=1)).unbind(1)
        return self.last(first - second)


SCALES = st.sampled_from([1e-30, 1e-23, 1e-22, 1e-19, 1e-10, 1e-3, 1.0, 1e3, 1e10, 2e18, 1e19])
# Two that broke the clip before norms made up for what rounding loses.
VANISHING, CANCELLING = (2e18, 1.0, 1e-22), (1.0, 1.0, 1e6)


@settings(max_examples=400, deadline=None)
@given(
    st.tuples(SCALES, SCALES, SCALES),
    st.sampled_from([1e-6, 1e-3, 0.25, 1e3]),
    st.integers(0, 50),
    st.sampled_from(["first", "middle", "last", ""]),
    st.booleans(),
    st.sampled_from([1, 2]),
)
@example(VANISHING, 1e-6, 3, "middle", False, 1)
@example(VANISHING, 1e-6, 3, "middle", True, 1)
@example(CANCELLING, 1e-3, 3, "middle", False, 2)
def test_no_model_that_a_server_sends_makes_a_record_pass_the_clip(
    scales: tuple[float, float, float], clip_norm: float, record: int, layer: str, masked: bool, positions: int
) -> None:
    """In single precision, as sites train: there squares of small numbers vanish, and the clip must hold."""
    torch.manual_seed(record)
    module = _Extreme(positions)
    with torch.no_grad():
        for part, scale in zip(module.children(), scales, strict=True):
            part.weight.mul_(scale)
            part.bias.zero_()
    model = FlatModel(module)
    flags = torch.zeros(model.size, dtype=torch.bool)
    for name, view in model.named_views(flags).items():
        view.fill_(name.startswith(layer))
    kept = flags.nonzero().squeeze(1)[1 if masked else 0 :]
    inputs, targets = torch.tensor(DATA.train_inputs[[record]]), torch.tensor(DATA.train_targets[[record]])
    change = ClippedSum(model, kept, clip_norm, 8)(inputs, targets)
    assert change.double().norm().item() <= clip_norm * (1 + 1e-5)


def noise_of(noise_multiplier: float, steps: int = 1) -> np.ndarray:
    """Return the noise in a million released coordinates, in units of the clip norm."""
    size, records = 1_000_000, 10
    # A model of a million parameters on inputs of zero: every gradient is zero, what is released is noise alone.
    plan = small_plan(
        size, mask_kept=size, noise_multiplier=noise_multiplier, clip_norm=2.0, steps=steps, sampling_rate=0.5
    )
    data = site_data(np.zeros((records, 1000), np.float32), np.zeros(records, np.int64))
    model = FlatModel(torch.nn.Linear(1000, 1000, bias=False))
    moved = train_round(model, data, plan, OsRandomness().for_round("r", 1))
    return moved.astype(np.float64) * 0.5 * records / 2.0


def test_noise_has_the_promised_scale() -> None:
    noise = noise_of(noise_multiplier=1.5)
    # The standard error of the std over a million draws is 0.07 %; 0.9x and 1.1x are 140 of them away.
    assert noise.std() == pytest.approx(1.5, rel=0.005)
    for wrong in (0.9, 1.1):
        assert noise_of(noise_multiplier=1.5 * wrong).std() != pytest.approx(1.5, rel=0.005)
    assert abs(noise.mean()) < 5 * 1.5 / 1000
    fourth = ((noise / 1.5) ** 4).mean()
    assert fourth == pytest.approx(3, abs=0.06)  # Gaussian kurtosis; uniform noise would give 1.8


def test_a_release_can_be_any_number_whatever_it_was_before_the_noise() -> None:
    """Noise in single precision leaves holes in what a sum can be, and the holes tell what was added to."""
    draws = OsRandomness().for_round("r", 1).standard_normal(100_000)
    assert draws.dtype == np.float64
    assert (draws.astype(np.float32) != draws).mean() > 0.99

    class Fixed(GeneratorRandomness):
        def standard_normal(self, count: int) -> np.ndarray:
            return draws[:count]

    size, model = START.size, FlatModel(build(SMALL_MODEL))
    model.load(START)
    plan = small_plan(size, mask_kept=size, clip_norm=1.0, learning_rate=240.0, steps=1)
    data = site_data(DATA.train_inputs, DATA.train_targets)
    moved = train_round(model, data, plan, Fixed(np.random.default_rng(1), np.random.default_rng(1)))
    model.load(START)
    total = ClippedSum(model, None, 1.0, 64)(torch.tensor(DATA.train_inputs), torch.tensor(DATA.train_targets)).numpy()
    once = (total.astype(np.float64) + draws[:size]).astype(np.float32)
    twice = total + draws[:size].astype(np.float32)
    assert (once != twice).any()
    assert np.array_equal(moved, (START - once) - START)


def test_draws_are_sums_of_draws_of_their_own() -> None:
    """The two halves of a chunk come from the same Box-Muller pairs: they must still be independent."""
    draws = OsRandomness().for_round("r", 1).standard_normal(1 << 16)
    first, second = draws[: 1 << 15], draws[1 << 15 :]
    for one, other in ((first, second), (first**2, second**2), (np.abs(first), np.abs(second))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(first.size)
    assert ((draws**4).mean()) == pytest.approx(3, abs=0.3)


def test_every_step_draws_noise_of_its_own() -> None:
    assert noise_of(noise_multiplier=1.0, steps=4).std() == pytest.approx(2.0, rel=0.005)  # sqrt(4), not 4 or 1


def test_noise_of_different_sites_rounds_and_restarts_is_unrelated() -> None:
    def noise(randomness: RoundRandomness) -> np.ndarray:
        return randomness.standard_normal(100_000)

    streams = [
        noise(SeededRandomness(1, 0).for_round("r", 1)),
        noise(SeededRandomness(1, 1).for_round("r", 1)),
        noise(SeededRandomness(1, 0).for_round("r", 2)),
        noise(SeededRandomness(2, 0).for_round("r", 1)),
        noise(OsRandomness().for_round("r", 1)),
        noise(OsRandomness().for_round("r", 1)),
    ]
    correlations = np.corrcoef(streams)[np.triu_indices(len(streams), 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(100_000)


def test_noise_does_not_follow_from_the_public_mask_seed() -> None:
    mask_words = np.random.Philox(key=small_plan(100, mask_seed=1).mask._key()).random_raw(4)
    noise_words = SeededRandomness(1, 0).for_round("r", 1).noise.bit_generator.random_raw(4)
    assert not set(mask_words.tolist()) & set(noise_words.tolist())


def test_inclusion_is_bernoulli_and_independent() -> None:
    randomness = OsRandomness().for_round("r", 1)
    steps, records, rate = 4000, 200, 0.1
    included = np.zeros((steps, records), bool)
    for step in range(steps):
        included[step, randomness.poisson_sample(records, rate)] = True
    per_record, per_step = included.mean(0), included.sum(1)
    assert np.abs(per_record - rate).max() < 5 * np.sqrt(rate * (1 - rate) / steps)
    # The batch size is binomial, not fixed: shuffled batches would have variance 0.
    assert per_step.var() == pytest.approx(records * rate * (1 - rate), rel=0.15)
    assert per_step.mean() == pytest.approx(records * rate, rel=0.02)


def test_the_divisor_does_not_depend_on_the_batch() -> None:
    # The released step must be a sum over a public number: dividing by the drawn batch would change the sensitivity.
    data = site_data(DATA.train_inputs, DATA.train_targets, declared_size=1000)
    model = FlatModel(build(SMALL_MODEL))
    model.load(START)
    plan = small_plan(START.size, noise_multiplier=1e-6, clip_norm=0.5, sampling_rate=1.0)
    moved = train_round(model, data, plan, OsRandomness().for_round("r", 1))
    model.load(START)
    reference = ClippedSum(model, torch.tensor(plan.mask.indices()), 0.5, 64)
    total = reference(torch.tensor(DATA.train_inputs), torch.tensor(DATA.train_targets)).numpy()
    assert moved == pytest.approx(-total / 1000, rel=1e-3, abs=1e-6)
    assert np.abs(total).max() / 1000 > 1e-2  # so that the comparison means something
