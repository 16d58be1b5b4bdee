"""Aggregation over the kept coordinates: the mean over sites, and the server's optimizer."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.coding import Values, clipped
from common.config import ServerOptimizerName
from common.mask import Indices
from common.randomness import RoundRandomness

_ADAM_BETA2 = 0.99
_ADAM_EPSILON = 1e-3  # FedAdam's tau (Reddi et al. 2021)


def weighted_mean(updates: Sequence[tuple[Values, float]]) -> Values:
    """Return sum(weight * values) / sum(weight), shape (kept,).

    Summed in float64 in the order given: the same updates in the same order give the same bits.
    """
    total = np.zeros(updates[0][0].shape, np.float64)
    weighted = np.empty_like(total)
    for values, weight in updates:
        total += values if weight == 1 else np.multiply(values, weight, out=weighted)
    mean: Values = (total / sum(weight for _, weight in updates)).astype(np.float32)
    return mean


def noisy_mean(
    updates: Sequence[Values], kept: int, clip_norm: float, noise_std: float, cohort: float, randomness: RoundRandomness
) -> Values:
    """Return (sum of clip(values, clip_norm) + N(0, noise_std^2)) / cohort, shape (kept,).

    Guarantees: adding or removing one update changes the sum by at most ``clip_norm``, whatever the site sent: values
    are clipped here too, since coding rounds them after the site has clipped them. ``cohort`` is the public expected
    number of updates, not the real one.
    Edge cases: no update at all gives noise, like any other round.
    """
    total = np.zeros(kept, np.float64)
    for values in updates:
        total += clipped(values, clip_norm)
    total += noise_std * randomness.standard_normal(kept)
    mean: Values = (total / cohort).astype(np.float32)
    return mean


class ModelAverage:
    """A moving average of the server's models, one a round: less noise than the last of them, for no privacy.

    Computes: sum of decay^(t - i) model_i / sum of decay^(t - i) over the rounds i <= t that moved the model.
    ``decay`` 0 gives the last model. It is what is evaluated and what a run ends with; sites go on from the last model.
    Source: Polyak and Juditsky (1992); for DP-SGD De et al., "Unlocking high-accuracy ..." (2022).
    """

    def __init__(self, decay: float, size: int) -> None:
        self._decay = np.float32(decay)
        self.state: dict[str, NDArray[np.float32]] = (
            {"average_sum": np.zeros(size, np.float32), "average_weight": np.zeros(1, np.float32)} if decay else {}
        )

    def add(self, model: Values) -> None:
        """Take in the model of one more round."""
        if self.state:
            self.state["average_sum"] = self._decay * self.state["average_sum"] + model
            self.state["average_weight"] = self._decay * self.state["average_weight"] + 1

    def of(self, model: Values) -> Values:
        """Return the average so far, or ``model`` where there is none."""
        if not self.state or not self.state["average_weight"][0]:
            return model
        return self.state["average_sum"] / self.state["average_weight"]


class ServerOptimizer:
    """Moves the model along the mean update, on the kept coordinates only; its state stays behind the mask too.

    With u the mean update and kept coordinates throughout:
    ``sgd``       model += learning_rate * u
    ``momentum``  v = momentum * v + u;  model += learning_rate * v
    ``adam``      m, v: moving averages of u and u^2, each corrected for how often that coordinate was kept so far;
                  model += learning_rate * m / (sqrt(v) + 1e-3)
    """

    def __init__(self, name: ServerOptimizerName, learning_rate: float, momentum: float, size: int) -> None:
        self._name = name
        self._learning_rate = learning_rate
        self._momentum = momentum
        arrays = {"sgd": (), "momentum": ("velocity",), "adam": ("mean", "square", "count")}[name]
        self.state: dict[str, NDArray[np.float32]] = {array: np.zeros(size, np.float32) for array in arrays}

    def step(self, model: Values, kept: Indices, update: Values) -> Values:
        """Return the next model; off the mask it has the bits of ``model``."""
        moved = model.copy()
        moved[kept] += np.float32(self._learning_rate) * self._direction(kept, update)
        return moved

    def noise_gain(self, noise_std: float) -> float:
        """Return the std of what one round adds to a coordinate of the model where the mean update is noise alone.

        With u = N(0, noise_std^2) in every round: ``sgd`` learning_rate * noise_std; ``momentum`` that over
        sqrt(1 - momentum^2); ``adam`` learning_rate * sqrt((1 - momentum) / (1 + momentum)) * noise_std /
        (noise_std + 1e-3).
        """
        match self._name:
            case "sgd":
                return self._learning_rate * noise_std
            case "momentum":
                return self._learning_rate * noise_std / math.sqrt(1 - self._momentum**2)
            case "adam":
                damping = math.sqrt((1 - self._momentum) / (1 + self._momentum))
                return self._learning_rate * damping * noise_std / (noise_std + _ADAM_EPSILON)

    def _direction(self, kept: Indices, update: Values) -> Values:
        state = self.state
        match self._name:
            case "sgd":
                return update
            case "momentum":
                velocity = np.float32(self._momentum) * state["velocity"][kept] + update
                state["velocity"][kept] = velocity
                return velocity
            case "adam":
                beta1, beta2 = np.float32(self._momentum), np.float32(_ADAM_BETA2)
                mean = beta1 * state["mean"][kept] + (1 - beta1) * update
                square = beta2 * state["square"][kept] + (1 - beta2) * update**2
                count = state["count"][kept] + 1
                state["mean"][kept], state["square"][kept], state["count"][kept] = mean, square, count
                direction: Values = (mean / (1 - beta1**count)) / (
                    np.sqrt(square / (1 - beta2**count)) + np.float32(_ADAM_EPSILON)
                )
                return direction
