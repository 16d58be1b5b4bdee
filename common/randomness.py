"""Randomness that protects: a cryptographic generator under keys of the operating system, and draws from it."""

import secrets
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from common.mask import Indices

_SUMMANDS = 4  # normal draws in one: Holohan and Braghin (2021), as in Opacus' secure mode
_BELOW_ONE = 1 - 2.0**-53
_CHUNK = 1 << 16  # draws made at a time: the intermediate arrays fit a core's cache


class RoundRandomness(Protocol):
    """The randomness of one round, of a site or of the server."""

    def poisson_sample(self, size: int, sampling_rate: float) -> Indices:
        """Return the records of a step: each of ``size`` is in it with probability ``sampling_rate``, independently."""
        ...

    def standard_normal(self, count: int) -> NDArray[Any]:
        """Return ``count`` independent draws of N(0, 1): doubles where they protect, floats will do in simulations."""
        ...

    def open_uniforms(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` independent draws, uniform on (0, 1), that have no smallest one: see ``open_uniforms``."""
        ...

    def module_seed(self) -> int:
        """Return a seed for what is random inside a module, such as dropout."""
        ...


def open_uniforms(words: Callable[[int], NDArray[np.uint64]], count: int) -> NDArray[np.float64]:
    """Return ``count`` draws, uniform on (0, 1), from a source of 64-bit ``words``.

    Computes: word / 2^64 rounded to a double; a word of zero stands for the interval below 2^-64 and is drawn again
    inside it, as often as need be.
    Guarantees: the tail near 0 goes on as far as doubles do. The exponential noise -log(u) is then unbounded: a cut
    tail would be an output that one data set can give and its neighbour cannot, which no epsilon covers.
    Edge cases: what would round up to 1 is the largest double below it.
    """
    uniforms = np.zeros(count)
    scale, missing = 2.0**-64, np.arange(count)
    while missing.size:
        drawn = words(missing.size)
        uniforms[missing] = drawn.astype(np.float64) * scale
        missing, scale = missing[drawn == 0], scale * 2.0**-64
    return np.minimum(uniforms, _BELOW_ONE, out=uniforms)


def laplace(randomness: RoundRandomness, count: int) -> NDArray[np.float64]:
    """Return ``count`` independent draws of the Laplace distribution of scale 1: the difference of two exponentials."""
    exponentials = np.log(randomness.open_uniforms(2 * count))
    draws: NDArray[np.float64] = exponentials[:count] - exponentials[count:]
    return draws


def gumbel(randomness: RoundRandomness, count: int) -> NDArray[np.float64]:
    """Return ``count`` independent draws of the standard Gumbel distribution: -log of an exponential.

    The exponential is -log(1 - u), so that the tail that decides who wins, large draws, comes from where u is exact.
    """
    draws: NDArray[np.float64] = -np.log(-np.log1p(-randomness.open_uniforms(count)))
    return draws


class KeyStream:
    """The key stream of ChaCha20: bits that nobody without the key can tell from random ones."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next ``count`` 64-bit words."""
        return np.frombuffer(self._cipher.update(bytes(8 * count)), "<u8")

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Return the next ``count`` draws, uniform over the 2^52 midpoints (i + 1/2) / 2^52: never 0 and never 1."""
        uniforms: NDArray[np.float64] = ((self.words(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return uniforms


class SecureRandomness:
    """Sampling and noise from a cryptographic generator.

    Floating point gives noise away: a draw can only take some of the numbers near it, so that a sum with it can only
    take some, and which ones depends on what was added (Mironov 2012; for Gaussians Jin et al. 2022). Two defences:
    draws and sums are doubles that are rounded to single precision once, at the end, which makes every number there
    reachable from anywhere; and a draw is the sum of four, halved, so that undoing it means searching all combinations
    (Holohan and Braghin, "Secure random sampling in differential privacy", 2021).
    """

    def __init__(self, sampling: KeyStream, noise: KeyStream) -> None:
        self._sampling = sampling
        self._noise = noise

    @classmethod
    def fresh(cls) -> "SecureRandomness":
        """Return streams under new 256-bit keys of the operating system."""
        return cls(KeyStream(secrets.token_bytes(32)), KeyStream(secrets.token_bytes(32)))

    def poisson_sample(self, size: int, sampling_rate: float) -> Indices:
        """Return the records of a step: each of ``size`` is in it with probability ``sampling_rate``, independently."""
        return np.flatnonzero(self._sampling.uniforms(size) < sampling_rate).astype(np.int64, copy=False)

    def standard_normal(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` independent draws of N(0, 1), in double precision: see ``client.dpsgd``."""
        draws = np.empty(count + count % 2)
        for start in range(0, draws.size, _CHUNK):
            chunk = draws[start : start + _CHUNK]
            half = chunk.size // 2
            # Box-Muller. The two draws of a pair go into different sums, so that each sum has four draws of its own.
            radius = np.sqrt(-2.0 * np.log(self._noise.uniforms(_SUMMANDS * half)))
            angle = 2.0 * np.pi * self._noise.uniforms(_SUMMANDS * half)
            for part, turn in ((chunk[:half], np.cos), (chunk[half:], np.sin)):
                part[:] = (radius * turn(angle)).reshape(_SUMMANDS, half).sum(0) / np.sqrt(_SUMMANDS)
        return draws[:count]

    def open_uniforms(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` independent draws, uniform on (0, 1), of the stream that noise comes from."""
        return open_uniforms(self._noise.words, count)

    def module_seed(self) -> int:
        """Return a seed for what is random inside a module, such as dropout."""
        return int(self._sampling.words(1)[0] >> np.uint64(1))
