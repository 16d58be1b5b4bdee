"""``fedsieve simulate --suggest``: settings to try, from theory and a short probing run on data that is not private."""

from dataclasses import dataclass

import numpy as np
import torch

from client.clipping.book_keeping import ClippedSum
from common import datasets
from common.config import RunConfig
from common.datasets import Dataset
from common.errors import ConfigError
from common.models import FlatModel, initial_vector, sample_losses
from server.methods import open_policy
from server.planning import planned_history, run_noise_multiplier

_STEPS = 30  # of the probing run
_RECORDS = 512
_MOMENTA = (0.0, 0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a short clipped run without noise saw: how far the loss fell and how fast the gradient turns."""

    loss_drop: float
    smoothness: float


def optimal_density(clip_term: float, noise_term: float) -> float:
    """Return the density that minimises U = clip_term / sqrt(density) + sqrt(density) * noise_term, at most 1.

    Computes: min(1, clip_term / noise_term), where the derivative of U is zero.
    Edge cases: without noise every coordinate should move: 1.
    Source: random-sparsification, Appendix G, equations 114 to 116, with r = 1 - density.
    """
    return 1.0 if noise_term <= clip_term else clip_term / noise_term


def bound_terms(
    probe: Probe,
    *,
    parameters: int,
    noise_multiplier: float,
    clip_norm: float,
    batch: float,
    learning_rate: float,
    steps: int,
) -> tuple[float, float]:
    """Return Delta_C and learning_rate * Delta_sigma of the convergence bound.

    Computes: Delta_C = loss_drop / (learning_rate steps) + learning_rate G clip_norm^2 / 2, with the clipping bias b of
    the paper taken as 0; Delta_sigma = clip_norm^2 noise_multiplier^2 parameters G / (2 batch^2).
    Source: random-sparsification, Appendix G.
    """
    clip_term = probe.loss_drop / (learning_rate * steps) + learning_rate * probe.smoothness * clip_norm**2 / 2
    noise_term = clip_norm**2 * noise_multiplier**2 * parameters * probe.smoothness / (2 * batch**2)
    return clip_term, learning_rate * noise_term


def scaling_partners(clip_norm: float, momentum: float) -> list[tuple[float, float]]:
    """Return pairs (clip norm, momentum) with the same clip_norm / (1 - momentum): the same amount of noise.

    Guarantees: for a velocity that persists, as that of ``ServerOptimizer``, which in the end moves a parameter by
    1 / (1 - momentum) times a round's noise. A site's velocity begins at zero in every round and moves it by less.
    Source: random-sparsification, Appendix H.
    """
    constant = clip_norm / (1 - momentum)
    return [(constant * (1 - mu), mu) for mu in _MOMENTA]


def synthetic_like(dataset: Dataset, seed: int) -> Dataset:
    """Return clusters with the shapes and classes of ``dataset``: its records themselves are not looked at."""
    if not np.issubdtype(dataset.train_targets.dtype, np.integer) or dataset.train_targets.ndim != 1:
        raise ConfigError("no synthetic data for targets that are not classes: name public data with --probe")
    rng = np.random.default_rng(seed)
    shape, classes = dataset.train_inputs.shape[1:], int(dataset.test_targets.max()) + 1
    targets = np.arange(_RECORDS) % classes
    centres = rng.random((classes, *shape))
    inputs = np.clip(centres[targets] + 0.3 * rng.standard_normal((_RECORDS, *shape)), 0, 1).astype(np.float32)
    return Dataset(inputs, targets.astype(np.int64), inputs[:1], targets[:1].astype(np.int64))


def probe(config: RunConfig, dataset: Dataset) -> Probe:
    """Train for a few clipped steps without noise on ``dataset``; NOT private, so it must hold no private record."""
    model = FlatModel.of(config.model)
    model.load(initial_vector(config.model, config.seed))
    inputs = torch.tensor(np.asarray(dataset.train_inputs[:_RECORDS]), dtype=model.vector.dtype)
    targets = torch.tensor(np.asarray(dataset.train_targets[:_RECORDS]))
    clipped = ClippedSum(model, None, config.clip_norm, config.physical_batch_size)

    def loss() -> float:
        with torch.no_grad():
            return float(sample_losses(model.module, model.module(inputs), targets).mean())

    first, lowest = loss(), loss()
    gradient, smoothness = model.gradient(inputs, targets) / len(inputs), 0.0
    for _ in range(_STEPS):
        move = clipped(inputs, targets) * (config.learning_rate / len(inputs))
        model.vector.sub_(move)
        turned = model.gradient(inputs, targets) / len(inputs)
        if float(move.norm()) > 0:
            smoothness = max(smoothness, float((turned - gradient).norm() / move.norm()))
        gradient, lowest = turned, min(lowest, loss())
    if not np.isfinite([first, lowest, smoothness]).all() or smoothness <= 0:
        raise ConfigError("the probing run did not stay finite: lower 'learning-rate', or name other data with --probe")
    return Probe(first - lowest, smoothness)


def suggest(config: RunConfig, probe_dataset: str | None) -> str:
    """Return what to try, and what that assumes, as text."""
    if not config.private or config.privacy_unit != "record":
        raise ConfigError("--suggest weighs the noise of a private run per record: got one without")
    own = datasets.load(config.dataset)
    records = len(own.train_targets)
    data = datasets.load(probe_dataset) if probe_dataset else synthetic_like(own, config.seed)
    seen = probe(config, data)
    parameters = initial_vector(config.model, config.seed).size
    policy = open_policy(config, parameters)
    noise_multiplier = run_noise_multiplier(config, policy)
    steps = sum(charge.steps for charge in planned_history(config, policy, noise_multiplier))
    # Every site adds noise of its own: over a cohort of c their mean is as noisy as a batch of q n sqrt(c).
    site_batch = config.sampling_rate * records / config.sites
    batch = site_batch * config.cohort_size**0.5
    clip_term, noise_term = bound_terms(
        seen,
        parameters=parameters,
        noise_multiplier=noise_multiplier,
        clip_norm=config.clip_norm,
        batch=batch,
        learning_rate=config.learning_rate,
        steps=steps,
    )
    density = optimal_density(clip_term, noise_term)
    momentum = config.server_momentum if config.server_optimizer == "momentum" else 0.0
    pairs = ", ".join(f"({clip:.3g}, {mu:g})" for clip, mu in scaling_partners(config.clip_norm, momentum))
    source = f"the data set {probe_dataset}" if probe_dataset else f"synthetic clusters shaped like {config.dataset}"
    return f"""\
final-density {density:.3g}   minimises the convergence bound (random-sparsification, Appendix G)
  loss and clipping   {clip_term:.4g}
  noise               {noise_term:.4g}   z {noise_multiplier:.4g}, {parameters:,} parameters, batch {batch:.4g}
(clip-norm, server-momentum) {pairs}
  with server-optimizer=momentum have the same clip-norm / (1 - server-momentum), the same noise (Appendix H): search
  along them

Assumed:
- G = {seen.smoothness:.4g}, how fast the gradient turns, and the fall of the loss by {seen.loss_drop:.4g} (here over
  {steps} steps) are those of a probing run of {_STEPS} clipped steps without noise on {source}.
  Of private data nothing is used but its shape, its number of classes and its declared size.
- The bound is the paper's, with the clipping bias taken as 0 and kappa as sqrt(density): an order of magnitude to
  start a search from, not an optimum of the accuracy. With cooling, final-density is where the run ends, not its mean.
- All sites have {records // config.sites} records; the mean over a cohort of {config.cohort_size} is as noisy as one
  batch of {batch:.4g} records.
- The scaling rule is for a velocity that persists: the server's. A site's (client-momentum) begins at zero in every
  round and has less noise. On masks the server's velocity waits while its coordinate is off the mask, then moves it by
  old gradients: the noise is the same, the accuracy need not be. Under Adam clip norm and momentum do not depend on
  each other."""
