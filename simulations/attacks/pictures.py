"""How alike two pictures are: mean squared error, peak signal-to-noise ratio, structural similarity."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Pictures = NDArray[np.float32]  # (height, width), values in [0, 1]


def mean_squared_error(one: Pictures, other: Pictures) -> float:
    """Return the mean of the squared differences."""
    return float(np.square(one.astype(np.float64) - other).mean())


def peak_signal_to_noise(one: Pictures, other: Pictures) -> float:
    """Return -10 log10(MSE) in dB, for values in [0, 1]; infinite where the pictures are the same."""
    error = mean_squared_error(one, other)
    return math.inf if error == 0 else -10 * math.log10(error)


def structural_similarity(one: Pictures, other: Pictures) -> float:
    """Return SSIM for values in [0, 1].

    Computes: the mean over the picture of (2 m1 m2 + c1)(2 s12 + c2) / ((m1^2 + m2^2 + c1)(s1^2 + s2^2 + c2)), with
    means, variances and covariance under a Gaussian window of std 1.5 cut at 11 pixels, c1 = 0.01^2, c2 = 0.03^2.
    Edge cases: the same picture twice gives 1.
    Source: Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment" (2004).
    """
    c1, c2 = 0.01**2, 0.03**2
    first, second = one.astype(np.float64), other.astype(np.float64)

    def blur(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return gaussian_filter(values, 1.5, truncate=5 / 1.5)

    mean1, mean2 = blur(first), blur(second)
    variance1, variance2 = blur(first * first) - mean1**2, blur(second * second) - mean2**2
    covariance = blur(first * second) - mean1 * mean2
    above = (2 * mean1 * mean2 + c1) * (2 * covariance + c2)
    return float((above / ((mean1**2 + mean2**2 + c1) * (variance1 + variance2 + c2))).mean())
