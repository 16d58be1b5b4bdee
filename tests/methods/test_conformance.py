"""What every method must pass. A method that is registered without a row here fails the first test."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import client.site
from client.data import SiteData
from client.ledger import Ledger
from client.mechanisms import train_round
from client.mechanisms.upload import Upload
from client.policy import SitePolicy
from client.randomness import OsRandomness
from client.site import Guard, Site, Workbench
from common import coding
from common.accounting import epsilon_of
from common.broadcast import digest_of, encode_floats, encode_mask, encode_reference
from common.coding import Values
from common.config import RunConfig
from common.errors import PlanRefused
from common.mask import let_go
from common.methods import METHODS, compressive
from common.models import FlatModel, build, initial_vector
from common.plan import RoundPlan
from common.randomness import RoundRandomness
from server.admission import AdmittedUpdate, admit_update
from server.methods import open_policy
from server.methods.policy import MethodPolicy
from server.planning import planned_history, round_plan
from server.runlog import Event, read_events
from simulations.audit import audit
from simulations.audit_plan import AuditPlan
from simulations.run import Engine, config_of_run, simulate
from simulations.seeded import GeneratorRandomness, SeededRandomness
from tests.support import FEATURES, SMALL_MODEL, Silence, silent, site_data, small_config, small_dataset

DATA = small_dataset()
WIDE_MODEL = "tests.support:wide_model"


@dataclass(frozen=True)
class Row:
    """One method's row: run-config keys that it needs in a small run, and what it promises where that is not C.

    ``sensitivity`` returns by how much one record may change a release without noise, in L2 norm and in units of
    learning_rate / (q n). The other settings are more keys for the audit, with ``audit_density``, and for the tests of
    sensitivity and of noise.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    sensitivity: Callable[[RoundPlan], float] = lambda plan: plan.clip_norm
    settings_of_audit: dict[str, Any] = field(default_factory=dict)
    settings_of_sensitivity: dict[str, Any] = field(default_factory=dict)
    settings_of_noise: dict[str, Any] = field(default_factory=dict)
    audit_density: float = 0.5


def longest_column(plan: RoundPlan) -> float:
    """Return how far measurements can move, in L2 norm: what they measure moves by 1 in L1 norm at most."""
    measurement = compressive.METHOD.measurement(plan)
    lengths = np.linalg.norm(measurement.columns().astype(np.float64), axis=1)
    return float(lengths.max()) * measurement.scale * 40 / plan.learning_rate


CHOOSES = {"pick_epsilon": 0.05, "final_density": 0.2, "pick_threshold": 0.0}


ROWS = {
    "dense": Row(),
    "random": Row(),
    "random-step": Row(),
    "posterior": Row(),
    "match-noise": Row({"noise_multiplier": 3.0}),
    "ranked": Row(),
    "importance": Row({"warmup_epochs": 2, "first_density": 0.2}, settings_of_audit={"warmup-epochs": 1}),
    "select-exponential": Row(CHOOSES),
    "select-sparse-vector": Row(CHOOSES, settings_of_audit={"pick-threshold": 0.0}),
    "select-random": Row(
        {**CHOOSES, "select_per": "round", "second_clip_norm": 0.01},
        sensitivity=lambda plan: 0.02 * 40 if plan.clip_norm / 40 > 0.02 else plan.clip_norm,
        settings_of_audit={"second-clip-norm": 0.0},
    ),
    "compressive": Row(
        {"steps_per_round": 1, "entry_bound": 0.01, "measurements": 200},
        sensitivity=longest_column,
        settings_of_sensitivity={
            "model": f"linear:{FEATURES}-3",
            "final_density": 0.001,
            "measurements": 50,
            "entry_bound": 0.001,
        },
        settings_of_noise={"model": "linear:200-1", "final_density": 0.001, "measurements": 40_000},
        settings_of_audit={"measurements": 8},
        audit_density=0.02,
    ),
    "noisy-only": Row(),
    "clip-only": Row(),
}

every_method = pytest.mark.parametrize("name", METHODS)
private_method = pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.private])


def config_of(name: str, out: Path = Path("unused"), **changes: Any) -> RunConfig:
    settings = {"name": "x", "rounds": 4, "density_schedule": "constant", "final_density": 0.5, "noise_multiplier": 2.0}
    return small_config(out, **{**settings, "epsilon": 1e4, **ROWS[name].settings, "method": name, **changes})


class Round:
    """One round of a method as server and site see it, after a round in which something was released.

    So masks are ranked, and standardised gradients have something to be standardised by.
    """

    def __init__(self, config: RunConfig, number: int | None = None) -> None:
        self.config = config
        self.reference = initial_vector(config.model, config.seed)
        self.policy: MethodPolicy = open_policy(config, self.reference.size)
        self.policy.begin(self.reference)
        self.model: Values = self.reference
        if number is None:
            number = config.rounds
            rng = np.random.default_rng(3)
            for earlier in range(1, number):
                plan = self.plan_of(earlier)
                update = (0.01 * rng.standard_normal(plan.mask.kept)).astype(np.float32)
                self.policy.learn(plan, plan.mask.indices(), update, 0.01)
            self.model = self.reference + (0.01 * rng.standard_normal(self.reference.size)).astype(np.float32)
        self.plan = self.plan_of(number)

    def plan_of(self, number: int) -> RoundPlan:
        """Return the plan of a round from the current model."""
        reference = self.policy.reference
        return round_plan(
            self.config,
            run="conformance",
            round_number=number,
            mask=self.policy.mask(number),
            noise_multiplier=self.config.noise_multiplier if self.config.how.adds_noise else 0.0,
            model_version=number - 1,
            model_digest=digest_of(self.model),
            model_step=0.0,
            reference_digest="" if reference is None else digest_of(reference),
        )

    @property
    def model_bytes(self) -> bytes:
        """What a site that holds nothing is sent."""
        mask = encode_mask(self.plan.mask) if self.plan.mask_chosen else b""
        reference = b""
        if self.plan.reference_digest not in ("", self.plan.model_digest):
            reference = encode_reference(encode_floats(self.reference, "f32"))
        return mask + reference + encode_floats(self.model, "f32")

    def release(self, data: SiteData, randomness: RoundRandomness) -> Upload:
        """Return what the method's mechanism would release, before its coding."""
        model = FlatModel(build(self.config.model))
        model.load(self.model)
        reference = self.reference if self.plan.reference_digest else None
        return train_round(model, data, self.plan, randomness, reference=reference)

    def dense(self, upload: Upload) -> np.ndarray:
        """Return an upload with its values in their places."""
        if self.plan.how.uploads == "measurements":
            return upload.values.astype(np.float64)
        dense = np.zeros(self.plan.mask_size)
        dense[self.plan.mask.indices() if upload.indices is None else upload.indices] = upload.values
        return dense


def test_every_registered_method_has_a_row() -> None:
    assert ROWS.keys() == METHODS.keys()
    for name, method in METHODS.items():
        assert method.name == name and method.title and method.paper and len(method.about) > 80
        assert method.private or "NOT PRIVATE" in method.title


def neighbours(others: int, loud: float) -> tuple[SiteData, SiteData]:
    """Return a site's data without and with one record that is as loud as can be; both declare the same size."""
    record = np.full((1, FEATURES), loud, np.float32)
    inputs, targets = DATA.train_inputs[:others], DATA.train_targets[:others]
    with_record = np.concatenate((inputs, record)), np.concatenate((targets, [1]))
    return site_data(inputs, targets, declared_size=40), site_data(*with_record, declared_size=40)


class FixedChoice(GeneratorRandomness):
    """No noise on values, and noise on choices that is so large that the data have no say: ``chosen`` wins.

    What a choice costs is accounted as such (tests/client/test_selection.py); given the choice, what is left to bound
    is by how much a record moves the chosen coordinates. So both neighbours are given the same one.
    """

    def __init__(self, size: int, chosen: np.ndarray) -> None:
        super().__init__(np.random.default_rng(0), Silence())  # type: ignore[arg-type]
        self._chosen = np.zeros(size, np.bool_)
        self._chosen[chosen] = True

    def open_uniforms(self, count: int) -> np.ndarray:
        """Return what makes the chosen ones first in an order and largest in Gumbel or Laplace noise."""
        tiny, nearly_one = 1e-300, 1 - 2.0**-53
        size = self._chosen.size
        if count == size:  # an order, random words, or Gumbel noise: large where these are small
            return np.where(self._chosen, tiny, nearly_one)
        if count == 2 * size:  # Laplace noise of the queries: the log of the first half over that of the second
            first = np.where(self._chosen, nearly_one, tiny)
            return np.concatenate((first, np.where(self._chosen, tiny, nearly_one)))
        return np.full(count, 0.5)  # Laplace noise of the thresholds: none


def changes_by_a_record(one: Round, loud: float) -> list[float]:
    """Return how far one record moves a release without noise, in units of learning_rate / (q n).

    Among 40 others, and alone: where the largest entries are all that is released, few of many records decide.
    Methods that choose coordinates are given the very ones that the record moves most.
    """

    def moved(data: tuple[SiteData, SiteData], randomness: RoundRandomness) -> np.ndarray:
        without, with_record = (one.dense(one.release(each, randomness)) for each in data)
        return (with_record - without) * 40 / one.plan.learning_rate

    changes = []
    for others in (0, 40):
        data = neighbours(others, loud)
        if one.plan.how.uploads == "indices and values":
            size, picks = one.plan.mask_size, one.plan.mask_kept
            everywhere = np.concatenate([moved(data, FixedChoice(size, at))[at] for at in parts(size, picks)])
            worst = np.sort(np.argsort(-np.abs(everywhere))[:picks])
            choice = FixedChoice(size, worst)
            for each in data:
                assert np.array_equal(one.release(each, choice).indices, worst), "the choice is fixed"
            changes.append(float(np.linalg.norm(moved(data, choice))))
        else:
            changes.append(float(np.linalg.norm(moved(data, silent()))))
    return changes


def parts(size: int, picks: int) -> list[np.ndarray]:
    """Return all coordinates in choices of ``picks``, in order; the last one may be shorter."""
    return [np.arange(start, min(start + picks, size)) for start in range(0, size, picks)]


@every_method
@pytest.mark.parametrize("loud", [1.0, 1e3])
def test_sensitivity(name: str, loud: float) -> None:
    settings = {"steps_per_round": 1, "sampling_rate": 1.0, "learning_rate": 0.5, "clip_norm": 0.1}
    one = Round(config_of(name, **{**settings, **ROWS[name].settings_of_sensitivity}))
    plan = one.plan = replace(one.plan, steps=1)
    changes = changes_by_a_record(one, loud)
    bound = ROWS[name].sensitivity(plan)
    if name == "noisy-only":
        assert max(changes) > 2 * bound, "not clipped: why it is labelled as it is"
    else:
        assert max(changes) <= bound * (1 + 1e-3)
        assert max(changes) > 0.2 * bound


@every_method
def test_noise_on_what_is_kept(name: str) -> None:
    settings = {"sampling_rate": 1.0, "steps_per_round": 1, "learning_rate": 0.5, "clip_norm": 2.0}
    one = Round(config_of(name, **{"model": WIDE_MODEL, **settings, **ROWS[name].settings_of_noise}))
    data = site_data(np.zeros((10, 200), np.float32), np.zeros(10, np.int64))  # every gradient is zero
    noisy, without = one.release(data, OsRandomness().for_round("r", 1)), one.release(data, silent())
    assert noisy.values.size == one.plan.how.most_values(one.plan)
    noise = noisy.values.astype(np.float64) - without.values
    if name == "clip-only":
        assert not noise.any()
        return
    promised = one.plan.how.noise_std(one.plan, 10)
    # 10,000 draws or more: the standard error of their std is 0.7 %; a fifth more or less is far away from all this.
    assert noise.std() == pytest.approx(promised, rel=0.04)
    assert abs(noise.mean()) < 5 * promised / np.sqrt(noise.size)
    assert (noise != 0).all()


def guard_at(path: Path) -> Guard:
    models = (SMALL_MODEL,)
    return Guard(SitePolicy(epsilon=1e4, delta=1e-5, models=models), Ledger.create(path / "site.ledger"))


@every_method
def test_ledger(name: str, tmp_path: Path) -> None:
    one = Round(config_of(name))
    guard = guard_at(tmp_path)
    site = Site(site_data(DATA.train_inputs, DATA.train_targets), OsRandomness(), Workbench("cpu"), guard)
    if not one.plan.how.private:
        with pytest.raises(PlanRefused, match=f"not private .its method is {name}."):
            site.train(one.plan.to_bytes(), one.model_bytes)
        assert guard.ledger.length == 0
        return
    first = site.train(one.plan.to_bytes(), one.model_bytes)
    assert guard.ledger.history == (one.plan.charge,)
    assert site.train(one.plan.to_bytes(), one.model_bytes) == first and guard.ledger.length == 1
    guard.ledger.close()
    assert Ledger(tmp_path / "site.ledger").history == (one.plan.charge,)


@private_method
def test_what_all_rounds_cost_is_what_was_planned(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    result = simulate(config, Engine(in_process=True))
    policy = open_policy(config, result.model.size)
    planned = epsilon_of(planned_history(config, policy, config.noise_multiplier), config.delta)
    assert result.epsilon == planned < 1e4
    assert planned > epsilon_of(planned_history(config, policy, config.noise_multiplier * 1.01), config.delta)


@every_method
def test_coding_round_trip(name: str) -> None:
    one = Round(config_of(name, grid=0.25))
    data = site_data(DATA.train_inputs, DATA.train_targets)
    raw = one.release(data, SeededRandomness(1, 0).for_round("", one.plan.round))
    site = Site(data, SeededRandomness(1, 0), Workbench("cpu"))
    admitted = admit_update(site.train(one.plan.to_bytes(), one.model_bytes), one.plan, data.declared_size)
    assert isinstance(admitted, AdmittedUpdate)
    step = one.plan.grid_step(data.declared_size)
    tolerance = step / 2 if one.plan.value_coding == "calibrated" else np.abs(raw.values).max() * 2e-3
    assert np.abs(admitted.values - raw.values).max() <= tolerance * (1 + 1e-4)
    assert (admitted.indices is None) == (raw.indices is None)
    indices, update = one.policy.combine(one.plan, [(admitted, 1.0)], one.model)
    assert np.all(np.diff(indices) > 0) and indices.size == update.size and np.isfinite(update).all()


def events_of(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_events(folder / "run.jsonl") if event["event"] == kind]


@every_method
def test_byte_counters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    received: list[int] = []
    values: list[int] = []
    train = Site.train

    def counted(self: Site, plan: bytes, model: bytes, *rest: Any) -> bytes:
        release = train(self, plan, model, *rest)
        sent.append(len(release))
        received.append(len(plan) + len(model))
        values.append(coding._HEADER.unpack_from(release)[9])
        return release

    monkeypatch.setattr(client.site.Site, "train", counted)
    result = simulate(config_of(name, tmp_path, sites=3), Engine(in_process=True))
    (end,) = events_of(result.folder, "end")
    for direction, counted_bytes in (("uplink", sent), ("downlink", received)):
        parts = end[direction]
        assert parts["index"] + parts["values"] + parts["header"] == sum(counted_bytes)
        assert 0 < parts["framing"] < 12 * 1000
    assert (end["uplink"]["index"] > 0) == (METHODS[name].uploads == "indices and values")
    for number, event in enumerate(events_of(result.folder, "round")):
        released = sum(values[3 * number : 3 * number + 3])
        assert event["bits_per_value"] == pytest.approx(8 * event["uplink"]["values"] / released, abs=1e-4)


@every_method
def test_resume(name: str, tmp_path: Path) -> None:
    """Stopped in the middle of an epoch, with sites that were not asked in every round."""
    settings = {"rounds": 6, "rounds_per_epoch": 2, "sites": 5, "cohort": 3, "server_optimizer": "momentum"}
    whole = simulate(config_of(name, tmp_path / "whole", **settings), Engine(in_process=True))

    def stop(event: Event) -> None:
        if event["event"] == "round" and event["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(config_of(name, tmp_path / "cut", **settings), Engine(in_process=True), (stop,))
    let_go()  # a restarted process holds no masks
    resumed = simulate(config_of_run(tmp_path / "cut" / "x"), Engine(in_process=True))
    assert resumed.model.tobytes() == whole.model.tobytes()
    assert (resumed.epsilon, resumed.uplink_bytes) == (whole.epsilon, whole.uplink_bytes)
    assert [event["admitted"] for event in events_of(whole.folder, "round")] == [3] * 6


@private_method
def test_audit(name: str) -> None:
    plan = AuditPlan(
        privacy_unit="record",
        noise_multiplier=1.5,
        sampling_rate=1.0,
        steps=1,
        rounds=3,
        density=ROWS[name].audit_density,
        value_coding="calibrated",
        grid=0.5,
        delta=1e-5,
        method=name,
        settings={"first-density": 0.3, **ROWS[name].settings_of_audit},
    )
    result = audit(plan, 1000, 1)
    assert 0 < result.lower_bound <= result.claimed_epsilon
