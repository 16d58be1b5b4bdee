"""Scattering features: a fixed transform of pictures, computed once and kept.

Its filters are wavelets that no data decided, so that it costs no privacy and has no parameter to train.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DatasetError

_SCALES = 2  # J: pictures shrink by 2^J
_BATCH = 256


def scattered(pictures: NDArray[Any], cache: Path) -> NDArray[np.float32]:
    """Return the scattering coefficients of pictures of one channel, shape (count, 81, height / 4, width / 4).

    ``pictures`` has shape (count, height, width), uint8 (divided by 255) or float32. What was computed before is found
    in ``cache`` by a hash of the pictures.
    Source: random-sparsification, section 6 (H-CNN/S); Oyallon and Mallat, "Deep roto-translation scattering" (2015).
    """
    if pictures.ndim == 4 and pictures.shape[1] == 1:
        pictures = pictures[:, 0]
    if pictures.ndim != 3:
        raise DatasetError(f"expected pictures of one channel, (count, height, width), got shape {pictures.shape}")
    name = hashlib.sha256(repr((pictures.shape, pictures.dtype.str)).encode() + np.ascontiguousarray(pictures).data)
    kept = cache / "scattering" / f"{name.hexdigest()[:32]}.npy"
    if kept.exists():
        return np.asarray(np.load(kept, allow_pickle=False))
    features = _transform(pictures)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, suffix=".npy", delete=False) as file:
        np.save(file, features, allow_pickle=False)
    os.replace(file.name, kept)  # noqa: PTH105 - whole or not at all, whoever else computes it now
    return features


def _transform(pictures: NDArray[Any]) -> NDArray[np.float32]:
    scattering = _kymatio()(_SCALES, pictures.shape[1:])
    scale = np.float32(255 if pictures.dtype == np.uint8 else 1)
    batches = [
        scattering((pictures[start : start + _BATCH] / scale).astype(np.float32))
        for start in range(0, len(pictures), _BATCH)
    ]
    height, width = (side // 2**_SCALES for side in pictures.shape[1:])
    if not batches:
        return np.zeros((0, 81, height, width), np.float32)
    return np.concatenate(batches).astype(np.float32, copy=False)


def _kymatio() -> Any:
    import scipy.special

    # kymatio 0.3 imports this name, which SciPy has renamed, for its three-dimensional transform: not used here.
    absent = not hasattr(scipy.special, "sph_harm")
    if absent:
        scipy.special.sph_harm = None
    try:
        from kymatio.numpy import Scattering2D
    except ImportError as error:
        raise DatasetError(
            "scattering features need the package kymatio: pip install 'kymatio>=0.3,<0.4', or use the data set "
            "without '+scattering'"
        ) from error
    finally:
        if absent:
            del scipy.special.sph_harm
    return Scattering2D
