"""Auditing in one run: does what a site releases tell more than the claimed epsilon allows?

Many canaries, each put into the site's data or left out by a coin; the real site carries out real plans; then, from
the releases alone, the audit guesses for the most and the least conspicuous canaries whether they were in. Under
(epsilon, delta)-differential privacy only so many guesses can be right, so that many right guesses prove a lower bound
on epsilon. A bound above the claim means that the mechanism, or the accounting, is broken.

A canary is a record whose gradient is one coordinate of its own and far longer than the clip norm: nothing else moves
that coordinate, so its score is how far the coordinate moved. That is the strongest record there can be.

Source: Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (2023).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom
from torch import Tensor, nn

from client.data import SiteData
from client.randomness import OsRandomness, Randomness
from client.site import Site, Workbench
from common import coding
from common.accountants import AccountantName
from common.accounting import calibrate_noise_multiplier, epsilon_of
from common.broadcast import digest_of, encode_floats, encode_mask
from common.charges import Charge, History, PrivacyUnit
from common.coding import Values
from common.config import ConfigValue, RunConfig
from common.errors import ConfigError
from common.methods import method_of
from common.models import FlatModel
from common.plan import RoundPlan
from common.randomness import RoundRandomness, SecureRandomness
from server.admission import AdmittedUpdate, Rejection, admit_update
from server.aggregate import noisy_mean
from server.methods import open_policy
from server.planning import planned_history, round_plan
from server.runfolder import RunFolder
from server.runlog import read_events
from simulations.report.summary import AUDIT_NAME as AUDIT_NAME
from simulations.run import config_with

_GUESSES = 0.08  # share of the canaries that are guessed: half from the top, half from the bottom
_LOUD = 100.0  # a canary's gradient over the clip norm: it is clipped, or the clip is broken
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """The mechanism that is audited, in the words of a run config."""

    privacy_unit: PrivacyUnit
    noise_multiplier: float
    sampling_rate: float
    steps: int
    rounds: int
    density: float
    value_coding: coding.ValueCoding
    grid: float
    delta: float
    accountant: AccountantName = "rdp"
    method: str = "random"
    settings: Mapping[str, ConfigValue] = field(default_factory=dict)  # of the method: other run-config keys

    @property
    def claimed_epsilon(self) -> float:
        """What the accountant says; where the unit is the client, ``sampling_rate`` is that of the cohort."""
        history: History = (Charge(self.noise_multiplier, self.sampling_rate, self.rounds),)
        if self.privacy_unit == "record":
            config = self.config(1000)
            history = planned_history(config, open_policy(config, 1000), self.noise_multiplier)
        return epsilon_of(history, self.delta, self.accountant)

    def config(self, size: int) -> RunConfig:
        """Return the run config of the audit's rounds, for a model of ``size`` canaries."""
        return config_with(
            {
                "density-schedule": "constant",
                "index-coding": "compact" if method_of(self.method).uploads == "indices and values" else "seed",
                **self.settings,
                "method": self.method,
                "model": "canaries",
                "sites": 1,
                "cohort": 0,
                "min-cohort": 1,
                "privacy-unit": "record",
                "rounds": self.rounds,
                "steps-per-round": self.steps,
                "sampling-rate": self.sampling_rate,
                "final-density": self.density,
                "value-coding": self.value_coding,
                "grid": self.grid,
                "delta": self.delta,
                "accountant": self.accountant,
                "clip-norm": 1.0,
                "learning-rate": 1.0,
                "client-momentum": 0.0,
                "physical-batch-size": 4096,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What the audit found. ``lower_bound`` holds with 95 % confidence; above the claim it is a proof of a fault."""

    claimed_epsilon: float
    lower_bound: float
    delta: float
    canaries: int
    guesses: int
    right: int

    @property
    def passed(self) -> bool:
        """Whether the claim stands."""
        return self.lower_bound <= self.claimed_epsilon


def plan_for(unit: PrivacyUnit, epsilon: float, delta: float) -> AuditPlan:
    """Return one full-batch step, calibrated tightly to (epsilon, delta): where an audit sees most."""
    noise_multiplier = calibrate_noise_multiplier(
        epsilon=epsilon, delta=delta, sampling_rate=1.0, steps=1, accountant="prv"
    )
    return AuditPlan(
        privacy_unit=unit,
        noise_multiplier=noise_multiplier,
        sampling_rate=1.0,
        steps=1,
        rounds=1,
        density=1.0,
        value_coding="calibrated",
        grid=0.5,
        delta=delta,
        accountant="prv",
    )


def plan_of_run(folder: Path) -> AuditPlan:
    """Return the mechanism of a run, as its log has it; a run that is not private cannot be audited."""
    start = next((event for event in read_events(RunFolder(folder).log) if event["event"] == "run"), None)
    if start is None or not start["private"]:
        raise ConfigError(f"the run in {folder} is not private: it claims nothing that could be audited")
    config = RunConfig.parse(start["config"])
    return AuditPlan(
        privacy_unit=config.privacy_unit,
        noise_multiplier=start["noise_multiplier"],
        sampling_rate=config.cohort_rate if config.privacy_unit == "client" else config.sampling_rate,
        steps=config.steps_per_round,
        rounds=config.rounds,
        density=config.final_density,
        value_coding=config.value_coding_used,
        grid=config.grid,
        delta=config.delta,
        accountant=config.accountant,
        method=config.method,
        settings={
            key: value
            for key, value in config.to_mapping().items()
            if key not in ("name", "out", "resume", "dataset", "partition", "server-key", "weighting")
        },
    )


class CanaryModel(nn.Module):
    """One parameter per canary; the gradient of record i is 1 at parameter i, times ``_LOUD``."""

    def __init__(self, canaries: int) -> None:
        super().__init__()
        self.moved = nn.Embedding(canaries, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the parameter of each record's canary."""
        return self.moved(inputs[:, 0].long())

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a loss that falls when the canary's parameter grows."""
        return -_LOUD * outputs[:, 0]


def audit(
    plan: AuditPlan,
    canaries: int,
    seed: int,
    randomness: Callable[[], Randomness] = OsRandomness,
    server_randomness: Callable[[], RoundRandomness] = SecureRandomness.fresh,
) -> AuditResult:
    """Run the mechanism on canaries and return what can be proved from its releases.

    ``seed`` decides which canaries are in; noise and sampling are the site's own.
    """
    if canaries < 100:
        raise ConfigError(f"expected at least 100 canaries, got {canaries}: with fewer nothing can be proved")
    included = np.random.default_rng(seed).random(canaries) < 0.5
    carry_out = _client_scores if plan.privacy_unit == "client" else _record_scores
    scores = carry_out(plan, included, randomness, server_randomness)
    guesses = max(2, round(_GUESSES * canaries / 2)) * 2
    order = np.argsort(scores)
    right = int((~included[order[: guesses // 2]]).sum() + included[order[-(guesses // 2) :]].sum())
    return AuditResult(
        claimed_epsilon=plan.claimed_epsilon,
        lower_bound=epsilon_lower_bound(canaries, guesses, right, plan.delta, 1 - _CONFIDENCE),
        delta=plan.delta,
        canaries=canaries,
        guesses=guesses,
        right=right,
    )


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of ``right`` right guesses or more under (epsilon, delta)-DP.

    Computes: with f(v) = P[Binomial(guesses, e^epsilon / (1 + e^epsilon)) >= v],
    f(right) + 2 canaries delta max over i >= 1 of (f(right - i) - f(right)) / i, at most 1.
    Source: Steinke et al. (2023), Theorem 5.2.
    """
    chance = 1 / (1 + np.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    steps = np.arange(1, right + 1)
    gained = np.cumsum(binom.pmf(right - steps, guesses, chance))
    slack = float((gained / steps).max()) if right else 0.0
    return min(1.0, tail + 2 * canaries * delta * slack)


def epsilon_lower_bound(canaries: int, guesses: int, right: int, delta: float, significance: float) -> float:
    """Return the largest epsilon that ``right`` right guesses rule out at ``significance``; 0 where none is."""
    low, high = 0.0, 1.0
    if p_value(canaries, guesses, right, 0.0, delta) >= significance:
        return 0.0
    while p_value(canaries, guesses, right, high, delta) < significance and high < 64:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if p_value(canaries, guesses, right, middle, delta) < significance:
            low = middle
        else:
            high = middle
    return low


class _Canaries(Workbench):
    """A workbench whose one model is the canaries'."""

    def __init__(self, canaries: int) -> None:
        super().__init__("cpu")
        self._canary_model = FlatModel(CanaryModel(canaries))

    def model(self, name: str) -> FlatModel:
        """Return the canaries' model, whatever its name."""
        return self._canary_model


def _round_plan(plan: AuditPlan, size: int, number: int, start: Values) -> RoundPlan:
    return RoundPlan(
        run="audit",
        round=number,
        model_version=0,
        model="canaries",
        mask_seed=1,
        mask_epoch=number,
        mask_size=size,
        mask_kept=max(1, round(plan.density * size)),
        private=True,
        privacy_unit=plan.privacy_unit,
        cohort=max(1.0, plan.sampling_rate * size),
        steps=plan.steps,
        sampling_rate=1.0 if plan.privacy_unit == "client" else plan.sampling_rate,
        clip_norm=1.0,
        noise_multiplier=plan.noise_multiplier,
        learning_rate=1.0,
        momentum=0.0,
        physical_batch_size=4096,
        value_coding=plan.value_coding,
        index_coding="seed",
        grid=plan.grid,
        model_digest=digest_of(start),
        model_step=0.0,
    )


def _released(site: Site, plan: RoundPlan, start: Values) -> Values:
    data = site.train(plan.to_bytes(), encode_floats(start, "f32"))
    step = plan.grid_step(site.declared_size)
    update = coding.decode(
        data, size=plan.mask.size, max_kept=plan.mask.kept, value_coding=plan.value_coding, grid_step=step
    )
    return update.values


def _record_scores(
    plan: AuditPlan,
    included: NDArray[np.bool_],
    randomness: Callable[[], Randomness],
    server_randomness: Callable[[], RoundRandomness],
) -> NDArray[np.float64]:
    """Return how far each canary's coordinate moved, where all included ones are records of one site."""
    size = included.size
    rows = np.flatnonzero(included)
    inputs = np.arange(size, dtype=np.float32)[:, None]
    data = SiteData(inputs, np.zeros(size, np.int64), rows, declared_size=size)
    site = Site(data, randomness(), _Canaries(size))
    scores, model = np.zeros(size), np.zeros(size, np.float32)
    config = plan.config(size)
    policy = open_policy(config, size)
    policy.begin(model)
    for number in range(1, plan.rounds + 1):
        reference = policy.reference
        one = round_plan(
            config,
            run="audit",
            round_number=number,
            mask=policy.mask(number),
            noise_multiplier=plan.noise_multiplier,
            model_version=0,
            model_digest=digest_of(model),
            model_step=0.0,
            reference_digest="" if reference is None else digest_of(reference),
        )
        update = _admitted(site, one, model)
        indices, mean = policy.combine(one, [(update, 1.0)], model)
        policy.learn(one, indices, mean, one.how.noise_std(one, size))
        scores[indices] += mean
        if reference is not None:  # a method that looks at the way of the model must see it move
            model = model.copy()
            model[indices] += mean
    return scores


def _admitted(site: Site, plan: RoundPlan, start: Values) -> AdmittedUpdate:
    mask = encode_mask(plan.mask) if plan.mask_chosen else b""
    data = site.train(plan.to_bytes(), mask + encode_floats(start, "f32"))
    admitted = admit_update(data, plan, site.declared_size)
    if isinstance(admitted, Rejection):
        raise ConfigError(f"the audited site's release was rejected: {admitted.reason}")
    return admitted


def _client_scores(
    plan: AuditPlan,
    included: NDArray[np.bool_],
    randomness: Callable[[], Randomness],
    server_randomness: Callable[[], RoundRandomness],
) -> NDArray[np.float64]:
    """Return how far each canary's coordinate moved, where every included one is a site of its own."""
    size = included.size
    inputs, workbench = np.arange(size, dtype=np.float32)[:, None], _Canaries(size)
    scores, start = np.zeros(size), np.zeros(size, np.float32)
    for number in range(1, plan.rounds + 1):
        one = _round_plan(plan, size, number, start)
        server = server_randomness()
        cohort = np.intersect1d(np.flatnonzero(included), server.poisson_sample(size, plan.sampling_rate))
        updates = []
        for row in cohort:
            data = SiteData(inputs, np.zeros(size, np.int64), np.array([row]), declared_size=1)
            updates.append(_released(Site(data, randomness(), workbench), one, start))
        noise_std = one.noise_multiplier * one.clip_norm
        mean = noisy_mean(updates, one.mask.kept, one.clip_norm, noise_std, one.cohort, server)
        scores[one.mask.indices()] += mean
    return scores
