"""Gradient inversion: finding the picture whose gradient points where a site's release points.

Minimises 1 - cos(m * gradient(x), release) + weight * TV(x) over pictures x in [0, 1] by signed Adam with a falling
step, for several pictures at a time. The attacker knows the model, the mask and the label, which is more than a server
knows. Source: Geiping, Bauermeister, Droege and Moeller, "Inverting gradients" (2020).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap

from client.site import Workbench
from common import datasets, models
from common.coding import Values
from common.models import FlatModel, sample_losses
from simulations.attacks import pictures
from simulations.attacks.settings import require_above_zero, require_at_least
from simulations.attacks.victim import Question, Release, Victim

PICTURES = "pictures.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class InversionSettings:
    """One attack: whom, how protected, and how hard to try."""

    density: float
    noise_multiplier: float
    clip_norm: float = 1.0
    dataset: str = "fashion-mnist-12k"
    model: str = "dp-cnn-s"
    pictures: int = 8
    iterations: int = 800
    step: float = 0.1
    smoothness: float = 0.1

    def __post_init__(self) -> None:
        require_at_least(self, 0.0, "noise_multiplier", "smoothness")
        require_at_least(self, 1, "pictures", "iterations")
        require_above_zero(self, "density", "clip_norm", "step")


@dataclass(frozen=True, slots=True)
class Inversion:
    """Pictures (n, height, width) and what the attack made of them."""

    originals: NDArray[np.float32]
    found: NDArray[np.float32]

    @property
    def figures(self) -> dict[str, float]:
        """Means over the pictures."""
        pairs = list(zip(self.originals, self.found, strict=True))
        return {
            "mse": float(np.mean([pictures.mean_squared_error(*pair) for pair in pairs])),
            "psnr": float(np.mean([pictures.peak_signal_to_noise(*pair) for pair in pairs])),
            "ssim": float(np.mean([pictures.structural_similarity(*pair) for pair in pairs])),
        }

    def save(self, folder: Path) -> None:
        """Keep the pictures for the page."""
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / PICTURES, originals=self.originals, found=self.found)

    @classmethod
    def load(cls, folder: Path) -> "Inversion":
        """Read the pictures of an attack that was carried out."""
        with np.load(folder / PICTURES, allow_pickle=False) as arrays:
            return cls(arrays["originals"], arrays["found"])


def invert_releases(
    settings: InversionSettings, seed: int, progress: Callable[[float], None] = lambda share: None
) -> Inversion:
    """Attack the releases of as many sites of one record each; the same seed attacks the same pictures."""
    torch.set_num_threads(1)
    dataset = datasets.load(settings.dataset)
    rows = np.random.default_rng(seed).choice(len(dataset.train_targets), settings.pictures, replace=False)
    originals = datasets.as_floats(dataset.train_inputs[rows])
    targets = dataset.train_targets[rows]
    start = models.initial_vector(settings.model, seed)
    question = Question(
        model=settings.model,
        density=settings.density,
        noise_multiplier=settings.noise_multiplier,
        clip_norm=settings.clip_norm,
    )
    workbench = Workbench("cpu")
    releases = [
        Victim(picture, int(target), start, seed, workbench).ask(question, round_number=number)
        for number, (picture, target) in enumerate(zip(originals, targets, strict=True), start=1)
    ]
    found = match_gradients(settings, start, releases, torch.tensor(targets), originals.shape, seed, progress)
    return Inversion(grey(originals), grey(found))


def grey(pictures: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return pictures of one channel (n, 1, height, width) without it."""
    return pictures.reshape(len(pictures), *pictures.shape[-2:])


def match_gradients(
    settings: InversionSettings,
    start: Values,
    releases: Sequence[Release],
    targets: Tensor,
    shape: Sequence[int],
    seed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> NDArray[np.float32]:
    """Return pictures (n, ...) whose masked gradients point as the releases do, all searched for at the same time."""
    flat = FlatModel.of(settings.model)
    flat.load(start)
    goals, mask = torch.zeros(len(releases), start.size), torch.zeros(len(releases), start.size)
    for number, release in enumerate(releases):
        kept = torch.tensor(release.kept)
        goals[number, kept] = torch.tensor(release.gradient, dtype=torch.float32)
        mask[number, kept] = 1.0

    def loss(vector: Tensor, picture: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(flat.module, flat.named_views(vector), (picture[None],))
        return sample_losses(flat.module, outputs, target[None]).sum()

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))  # one gradient for each picture, (n, d)
    guess = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    optimizer = torch.optim.Adam([guess], lr=settings.step)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.iterations)
    for done in range(settings.iterations):
        guessed = gradients(flat.vector, guess, targets) * mask
        distance = 1 - torch.nn.functional.cosine_similarity(guessed, goals, dim=1)
        cost = distance.sum() + settings.smoothness * _total_variation(guess)
        (slope,) = torch.autograd.grad(cost, guess)
        guess.grad = slope.sign()
        optimizer.step()
        falling.step()
        with torch.no_grad():
            guess.clamp_(0, 1)
        progress((done + 1) / settings.iterations)
    found: NDArray[np.float32] = guess.detach().numpy()
    return found


def _total_variation(images: Tensor) -> Tensor:
    """Return the sum over pictures of the mean absolute difference between neighbours, down and across."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean(dim=(-1, -2)).sum()
    across = (images[..., :, 1:] - images[..., :, :-1]).abs().mean(dim=(-1, -2)).sum()
    return down + across
