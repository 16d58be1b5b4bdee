"""How much noise a release carries: what its coding is calibrated to."""

import math


def release_noise_std(
    *,
    noise_multiplier: float,
    clip_norm: float,
    learning_rate: float,
    sampling_rate: float,
    steps: int,
    momentum: float,
    declared_size: int,
) -> float:
    """Return s, the std of the noise in each coordinate that a site of n = ``declared_size`` records releases.

    Computes: s = learning_rate * noise_multiplier * clip_norm / (sampling_rate * n) * sqrt(sum over m = 1..steps of
    (1 + momentum + ... + momentum^(m-1))^2): the noise of a step moves the parameters in that step and, through the
    velocity, in every later one of the round. Without momentum the root is sqrt(steps).
    Guarantees: a function of the plan and of a public number, never of data; the same bits on every machine (sums,
    products, quotients and one square root, all exactly rounded).
    """
    reach, squares = 0.0, 0.0
    for _ in range(steps):
        reach = 1.0 + momentum * reach
        squares += reach * reach
    return learning_rate * noise_multiplier * clip_norm / (sampling_rate * declared_size) * math.sqrt(squares)
