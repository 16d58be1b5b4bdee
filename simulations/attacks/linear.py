"""The closed-form attack on a linear layer, and the bound on its error.

A linear layer whose parameters are all zero has the gradient k x = g by its weights, with k = dL/d(outputs) the same
for every input: softmax gives k = 1/classes - onehot(label). Each pixel is then a problem of one unknown, of which the
release has the coordinates that the mask kept, with noise: k_m x = g_m + noise, solved by least squares.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client.site import Workbench
from common import datasets
from common.errors import ConfigError
from common.mask import kept_count
from simulations.attacks.inversion import Inversion, grey
from simulations.attacks.settings import require_above_zero, require_at_least
from simulations.attacks.victim import Question, Release, Victim

_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSettings:
    """One attack; ``noise`` is the std sigma of the noise in each released coordinate."""

    density: float
    noise: float
    dataset: str = "fashion-mnist-12k"
    pictures: int = 16

    def __post_init__(self) -> None:
        require_above_zero(self, "density", "noise")
        require_at_least(self, 1, "pictures")


@dataclass(frozen=True, slots=True)
class LinearAttack:
    """What the attack found: the pictures, its squared error over the pixels that it could solve for, and the bound."""

    pictures: Inversion
    solvable: float
    error: float
    bound: float

    @property
    def figures(self) -> dict[str, float]:
        """The figures of an experiment."""
        ratio = self.error / self.bound
        return {"error": self.error, "bound": self.bound, "ratio": ratio, "solvable": self.solvable}


def solvable_share(kept: int, size: int, equations: int) -> float:
    """Return how likely a mask that keeps ``kept`` of ``size`` coordinates keeps one of ``equations`` given ones.

    Computes: 1 - C(size - equations, kept) / C(size, kept).
    """
    lost = 1.0
    for number in range(equations):
        lost *= max(size - kept - number, 0) / (size - number)
    return 1 - lost


def bound(noise: float, kept: int, size: int, constraint: NDArray[np.float64]) -> float:
    """Return the least expected squared error of the attack on an input digit that it can solve for.

    Computes: p noise^2 size / (kept ||constraint||^2), p the chance that the mask m keeps an equation of the digit.
    The error under a mask is noise^2 / ||m * constraint||^2. Over all masks ||m * constraint||^2 has the mean
    ||constraint||^2 kept / size; over the masks that keep an equation its mean is 1 / p times that, and by Jensen's
    inequality the mean error is at least noise^2 over it.
    Edge cases: reached without a mask. Under one the error is above it, even where all entries of the constraint are
    alike: masks keep more equations of one digit and fewer of another.
    Source: random-sparsification, Theorem 5.1, which assumes that an equation is kept and leaves out p.
    """
    share = solvable_share(kept, size, int(np.count_nonzero(constraint)))
    return share * noise**2 * size / (kept * float(np.square(constraint).sum()))


def attack_releases(
    settings: LinearSettings, seed: int, progress: Callable[[float], None] = lambda share: None
) -> LinearAttack:
    """Attack the releases of sites of one picture each, with new masks and new noise; every pixel is one trial."""
    dataset = datasets.load(settings.dataset)
    rows = np.random.default_rng(seed).choice(len(dataset.train_targets), settings.pictures, replace=False)
    originals = datasets.as_floats(dataset.train_inputs[rows])
    pixels = originals[0].size
    # The theorem has no clipping: with this clip norm no gradient ||k|| ||(x, 1)|| of a picture in [0, 1] reaches it.
    clip_norm = float(np.sqrt(pixels + 1.0))
    question = Question(
        model=f"linear:{pixels}-{_CLASSES}",
        density=settings.density,
        noise_multiplier=settings.noise / clip_norm,
        clip_norm=clip_norm,
    )
    start = np.zeros(pixels * _CLASSES + _CLASSES, np.float32)
    workbench = Workbench("cpu")
    found, errors, solvable = [], [], 0
    constraint = np.zeros(_CLASSES)
    for number, (picture, target) in enumerate(zip(originals, dataset.train_targets[rows], strict=True), start=1):
        if not 0 <= target < _CLASSES:
            raise ConfigError(f"expected targets from 0 to {_CLASSES - 1}, got {target} in {settings.dataset}")
        constraint = np.full(_CLASSES, 1 / _CLASSES)
        constraint[target] -= 1
        release = Victim(picture, int(target), start, seed, workbench).ask(question, round_number=number)
        solution, solved = solve(release, constraint, pixels)
        found.append(np.clip(solution, 0, 1).astype(np.float32).reshape(picture.shape))
        errors.append(np.square(solution - picture.reshape(-1))[solved])
        solvable += int(solved.sum())
        progress(number / settings.pictures)
    # The squared norm of the constraint is the same for every label.
    return LinearAttack(
        Inversion(grey(originals), grey(np.stack(found))),
        solvable / originals.size,
        float(np.concatenate(errors).mean()),
        bound(settings.noise, kept_count(start.size, settings.density), start.size, constraint),
    )


def solve(
    release: Release, constraint: NDArray[np.float64], pixels: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the least-squares input digits (pixels,), and which of them the mask left any equation for; others are 0.

    Computes: x_j = sum_i m_ij k_i g_ij / sum_i m_ij k_i^2, with g_ij the gradient by the weight of output i, pixel j.
    """
    weights = release.kept < constraint.size * pixels  # the biases come after them and do not know the input
    output, pixel = np.divmod(release.kept[weights], pixels)
    k = constraint[output]
    above = np.bincount(pixel, k * release.gradient[weights], minlength=pixels)
    below = np.bincount(pixel, k * k, minlength=pixels)
    solved = below > 0
    return np.divide(above, below, out=np.zeros(pixels), where=solved), solved
