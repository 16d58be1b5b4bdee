"""The Site: carries out a plan on its own data and returns nothing but a coded update."""

import torch

from client.data import SiteData
from client.dpsgd import train_round
from client.randomness import Randomness
from common import coding, models
from common.coding import SparseUpdate
from common.errors import ConfigError, PlanRefused
from common.plan import RoundPlan


class Workbench:
    """The models that this process trains, built once each and lent to one site at a time."""

    def __init__(self, device: str = "auto") -> None:
        self._device = _resolve_device(device)
        self._models: dict[str, models.FlatModel] = {}

    def model(self, name: str) -> models.FlatModel:
        """Return the model of that name; its parameters are whatever its last user left."""
        if name not in self._models:
            self._models[name] = models.FlatModel(models.build(name), self._device)
        return self._models[name]


class Site:
    """One owner of data. The same object everywhere: in a test, in a simulation, behind a daemon."""

    def __init__(self, data: SiteData, randomness: Randomness, workbench: Workbench) -> None:
        self._data = data
        self._randomness = randomness
        self._workbench = workbench

    @property
    def declared_size(self) -> int:
        """The number of records that this site makes public."""
        return self._data.declared_size

    def train(self, plan_bytes: bytes, model_bytes: bytes) -> bytes:
        """Carry out a plan from the given model and return the coded update.

        Raises WireError for bytes that are not a plan or a model, PlanRefused for a plan that this site cannot or will
        not carry out; in both cases nothing was spent.
        """
        plan = RoundPlan.from_bytes(plan_bytes)
        model = self._workbench.model(plan.model)
        if model.size != plan.mask.size:
            raise PlanRefused(f"plan speaks of {plan.mask.size} parameters, but {plan.model} has {model.size} here")
        model.load(coding.decode_model(model_bytes, model.size))
        randomness = self._randomness.for_round(plan.run, plan.round)
        values = train_round(model, self._data, plan, randomness)
        update = SparseUpdate(plan.round, plan.model_version, plan.mask.digest(), plan.mask.size, values)
        return coding.encode(update, plan.value_coding)


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"expected device auto, cpu or cuda[:N], got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no CUDA device here: use device=auto or cpu")
    return device
