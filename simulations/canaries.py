"""Canaries, and what an attacker scores them by: each function lets the real site code carry out an audit's rounds.

A canary is the strongest record there can be: its gradient is far longer than the clip norm, and nothing else moves
what it moves. Where coordinates are released, it has one coordinate of its own, and its score is how far that moved.
Where whole sites are protected, it is the only record of a site of its own. Where measurements are released, every
number tells of all coordinates, so that one site has one canary; its score is the likelihood ratio of all that the site
released.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from client.data import SiteData
from client.randomness import Randomness
from client.site import Site, Workbench
from common import coding
from common.broadcast import digest_of, encode_floats, encode_mask
from common.coding import Values
from common.compressive import Measurement, largest_entries
from common.config import RunConfig
from common.errors import ConfigError
from common.methods import compressive, method_of
from common.models import FlatModel
from common.plan import RoundPlan
from common.randomness import RoundRandomness
from server.admission import AdmittedUpdate, Rejection, admit_update
from server.aggregate import noisy_mean
from server.methods import open_policy
from server.methods.policy import MethodPolicy
from server.planning import round_plan
from simulations.audit_plan import AuditPlan

Scores = NDArray[np.float64]
Included = NDArray[np.bool_]

_LOUD = 100.0  # a canary's gradient over the clip norm: it is clipped, or the clip is broken
_OTHERS = 30  # records of a measured site besides the canary: without it, nearly every sample has one of them


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


class MeasuredModel(nn.Module):
    """A record is its own gradient, turned around: what it has at a coordinate, that coordinate grows by."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.moved = nn.Linear(size, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inner product of each record with the parameters."""
        return self.moved(inputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a loss that falls when the parameters move towards the record."""
        return -outputs[:, 0]


class _OneModel(Workbench):
    """A workbench with one model, that of the canaries."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__("cpu")
        self._canary_model = FlatModel(module)

    def model(self, name: str) -> FlatModel:
        """Return the canaries' model, whatever its name."""
        return self._canary_model


def scores_of(
    plan: AuditPlan,
    included: Included,
    randomness: Callable[[], Randomness],
    server_randomness: Callable[[], RoundRandomness],
) -> Scores:
    """Return how conspicuous each canary is in what was released, the included ones having taken part."""
    if plan.privacy_unit == "client":
        return _client_scores(plan, included, randomness, server_randomness)
    if method_of(plan.method).uploads == "measurements":
        return _measured_scores(plan, included, randomness)
    return _record_scores(plan, included, randomness)


def _record_scores(plan: AuditPlan, included: Included, randomness: Callable[[], Randomness]) -> Scores:
    """Return how far each canary's coordinate moved, where all included ones are records of one site."""
    size = included.size
    inputs = np.arange(size, dtype=np.float32)[:, None]
    data = SiteData(inputs, np.zeros(size, np.int64), np.flatnonzero(included), declared_size=size)
    site = Site(data, randomness(), _OneModel(CanaryModel(size)))
    scores, model = np.zeros(size), np.zeros(size, np.float32)
    config = plan.config(size)
    policy = open_policy(config, size)
    policy.begin(model)
    for number in range(1, plan.rounds + 1):
        one = _round_plan(plan, config, policy, number, model)
        update = _admitted(site, one, model)
        indices, mean = policy.combine(one, [(update, 1.0)], model)
        policy.learn(one, indices, mean, one.how.noise_std(one, size))
        scores[indices] += mean
        if policy.reference is not None:  # a method that looks at the way of the model must see it move
            model = model.copy()
            model[indices] += mean
    return scores


def _measured_scores(plan: AuditPlan, included: Included, randomness: Callable[[], Randomness]) -> Scores:
    """Return the log of the likelihood ratio of what each site released, with its canary and without.

    All records of a site pull the same kappa coordinates one way, its canary pulls them the other way and wins: what is
    measured goes from one end of its range to the other, which is as far as it can. Sites are apart, so that adding or
    removing a canary changes the release of one of them alone, and all together claim what one of them does.
    """
    size = plan.size(included.size)
    config, model = plan.config(included.size), np.zeros(size, np.float32)
    policy, workbench = open_policy(config, size), _OneModel(MeasuredModel(size))
    towards = _aligned(compressive.METHOD.measurement(_round_plan(plan, config, policy, 1, model)))
    inputs = np.append(np.tile(-towards, (_OTHERS, 1)), [_LOUD * _OTHERS * towards], axis=0)  # the canary comes last
    inputs = (inputs * _LOUD * config.entry_bound).astype(np.float32)
    scores = np.zeros(included.size)
    sites = [
        Site(
            SiteData(inputs, np.zeros(_OTHERS + 1), np.arange(_OTHERS + there), declared_size=_OTHERS + 1),
            randomness(),
            workbench,
        )
        for there in included
    ]
    for number in range(1, plan.rounds + 1):
        one = _round_plan(plan, config, policy, number, model)
        measurement = compressive.METHOD.measurement(one)
        place = np.flatnonzero(towards)
        # The gradient of a record is the record turned around; without the canary the mean is the others'.
        with_canary = measurement.of(place, -towards[place] / (2 * measurement.sparsity))
        scale = measurement.noise_scale(1 / plan.noise_multiplier)
        for canary, site in enumerate(sites):
            released = _admitted(site, one, model).values.astype(np.float64)
            ratio = (np.abs(released + with_canary) - np.abs(released - with_canary)).sum() / scale
            scores[canary] += np.logaddexp(_log(1 - plan.sampling_rate), _log(plan.sampling_rate) + ratio)
    return scores


def _aligned(measurement: Measurement) -> NDArray[np.float64]:
    """Return +1 or -1 at kappa coordinates and 0 elsewhere, so that their columns add up to a long one in L1 norm.

    With kappa = 1 that is the longest column; with more, those that point most into the same directions as it.
    """
    columns = measurement.columns().astype(np.float64)  # (size, rows)
    longest = columns[np.abs(columns).sum(1).argmax()]
    along = columns @ np.sign(longest)
    towards = np.zeros(measurement.size)
    place = largest_entries(along, measurement.sparsity)
    towards[place] = np.where(along[place] < 0, -1.0, 1.0)
    return towards


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def _round_plan(plan: AuditPlan, config: RunConfig, policy: MethodPolicy, number: int, model: Values) -> RoundPlan:
    reference = policy.reference
    return round_plan(
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


def _admitted(site: Site, plan: RoundPlan, start: Values) -> AdmittedUpdate:
    mask = encode_mask(plan.mask) if plan.mask_chosen else b""
    data = site.train(plan.to_bytes(), mask + encode_floats(start, "f32"))
    admitted = admit_update(data, plan, site.declared_size)
    if isinstance(admitted, Rejection):
        raise ConfigError(f"the audited site's release was rejected: {admitted.reason}")
    return admitted


def _client_scores(
    plan: AuditPlan,
    included: Included,
    randomness: Callable[[], Randomness],
    server_randomness: Callable[[], RoundRandomness],
) -> Scores:
    """Return how far each canary's coordinate moved, where every included one is a site of its own."""
    size = included.size
    inputs, workbench = np.arange(size, dtype=np.float32)[:, None], _OneModel(CanaryModel(size))
    scores, start = np.zeros(size), np.zeros(size, np.float32)
    for number in range(1, plan.rounds + 1):
        one = _client_plan(plan, size, number, start)
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


def _client_plan(plan: AuditPlan, size: int, number: int, start: Values) -> RoundPlan:
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
