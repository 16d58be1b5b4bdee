"""A site's records."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.datasets import as_floats
from common.errors import DatasetError
from common.mask import Indices


@dataclass(frozen=True, slots=True)
class SiteData:
    """The ``rows`` of shared arrays that belong to one site; nothing is copied until a batch is taken.

    ``declared_size`` is n in the divisor q * n of every step: a number that the site's operator makes public, so that
    the divisor does not depend on any single record. The real number of records may differ from it.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any]
    rows: Indices
    declared_size: int

    def __post_init__(self) -> None:
        if self.declared_size < 1:
            raise DatasetError(f"expected a declared size of at least 1, got {self.declared_size}")

    @property
    def size(self) -> int:
        """How many records there really are: private."""
        return int(self.rows.size)

    def example(self, count: int, device: torch.device, below: int = 1) -> tuple[Tensor, Tensor]:
        """Return ``count`` made-up records of the shape of this site's, the same every time: they tell nothing.

        Inputs are from 0 to ``below``, so that tokens and classes are whole numbers below it.
        """
        rng = np.random.default_rng(0)
        inputs = below * rng.random((count, *self.inputs.shape[1:]), np.float32)
        if self.targets.dtype == np.float32:  # not zeros: a model that begins at zero would have nothing to learn
            targets = torch.from_numpy(rng.random((count, *self.targets.shape[1:]), np.float32))
        else:
            classes = np.arange(count).reshape(-1, *[1] * (self.targets.ndim - 1)) % below
            targets = torch.from_numpy(np.broadcast_to(classes, (count, *self.targets.shape[1:])).copy())
        return torch.from_numpy(inputs).to(device), targets.to(device)

    def batch(self, selected: Indices, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the ``selected`` records of this site."""
        rows = self.rows[selected]
        inputs = torch.from_numpy(as_floats(self.inputs[rows]))
        return inputs.to(device), torch.from_numpy(self.targets[rows]).to(device)
