"""Randomness that protects: a cryptographic generator under keys of the operating system, and normal draws from it."""

import secrets
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from common.coding import Values
from common.mask import Indices

_SUMMANDS = 4  # normal draws in one: Holohan and Braghin (2021), as in Opacus' secure mode
_CHUNK = 1 << 16  # draws made at a time: the intermediate arrays fit a core's cache


class RoundRandomness(Protocol):
    """The randomness of one round, of a site or of the server."""

    def poisson_sample(self, size: int, sampling_rate: float) -> Indices:
        """Return the records of a step: each of ``size`` is in it with probability ``sampling_rate``, independently."""
        ...

    def standard_normal(self, count: int) -> Values:
        """Return ``count`` independent draws of N(0, 1)."""
        ...

    def module_seed(self) -> int:
        """Return a seed for what is random inside a module, such as dropout."""
        ...


class KeyStream:
    """The key stream of ChaCha20: bits that nobody without the key can tell from random ones."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next ``count`` 64-bit words."""
        return np.frombuffer(self._cipher.update(bytes(8 * count)), "<u8")

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Return the next ``count`` draws, uniform over the 2^53 midpoints (i + 1/2) / 2^53: never 0 and never 1."""
        uniforms: NDArray[np.float64] = ((self.words(count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return uniforms


class SecureRandomness:
    """Sampling and noise from a cryptographic generator.

    A draw of N(0, 1) is the sum of four normal draws, halved. One draw alone, computed in floating point, can only take
    some of the numbers near it, and which ones depends on what it is added to: whoever sees the sum can tell some
    neighbouring data sets apart (Mironov 2012; for Gaussians Jin et al. 2022). To undo a sum of four, an attacker has
    to search the combinations of draws that could have led to it. Source: Holohan and Braghin, "Secure random sampling
    in differential privacy" (2021).
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

    def standard_normal(self, count: int) -> Values:
        """Return ``count`` independent draws of N(0, 1)."""
        draws = np.empty(count, np.float32)
        for start in range(0, count, _CHUNK):
            chunk = draws[start : start + _CHUNK]
            chunk[:] = self._normals(_SUMMANDS * chunk.size).reshape(_SUMMANDS, -1).sum(0) / np.sqrt(_SUMMANDS)
        return draws

    def module_seed(self) -> int:
        """Return a seed for what is random inside a module, such as dropout."""
        return int(self._sampling.words(1)[0] >> np.uint64(1))

    def _normals(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` normal draws by the Box-Muller transform; ``count`` is even."""
        radius = np.sqrt(-2.0 * np.log(self._noise.uniforms(count // 2)))
        angle = 2.0 * np.pi * self._noise.uniforms(count // 2)
        return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
