"""The Site: carries out a plan on its own data and returns nothing but a coded update."""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from client.clipping.self_check import require_agreement
from client.data import SiteData
from client.ledger import Ledger
from client.mechanisms import train_round
from client.policy import SitePolicy
from client.randomness import OsRandomness, Randomness
from common import broadcast, coding, models
from common.coding import SparseUpdate, Values
from common.errors import ConfigError, NoRelease, PlanRefused
from common.plan import RoundPlan
from common.signing import is_signed_by

log = logging.getLogger("fedsieve.site")

_LEAST_STEP = 1e-30


class TrainingStopped(Exception):  # noqa: N818 - not an error: the operator stops the site
    """Raised by the ``progress`` of ``Site.train``: the round can be asked for again under its charge."""


class Workbench:
    """The models that this process trains, built once each and lent to one site at a time.

    ``shelf`` holds the broadcast models that came last, by digest: the next one may come as a difference from them.
    """

    def __init__(self, device: str = "auto", shelf_size: int = 3) -> None:
        self._device = _resolve_device(device)
        self._models: dict[str, models.FlatModel] = {}
        self.shelf = Shelf(shelf_size)

    def model(self, name: str) -> models.FlatModel:
        """Return the model of that name; its parameters are whatever its last user left."""
        if name not in self._models:
            self._models[name] = models.FlatModel.of(name, self._device)
        return self._models[name]


class Shelf:
    """The broadcast models that were received last, by digest: at most ``size`` of them, the latest used stay."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: OrderedDict[str, Values] = OrderedDict()

    def get(self, digest: str) -> Values | None:
        """Return the model of that digest, if it is held."""
        if digest in self._held:
            self._held.move_to_end(digest)
        return self._held.get(digest)

    def received(self, plan: RoundPlan, data: bytes) -> Values:
        """Return the model that ``plan`` starts from, and hold it; ``data`` is what came with the plan.

        A process that plays many sites is given the same model for each of them and decodes it once.
        """
        data, reference = broadcast.unpack(data, plan, self.get)
        if reference is not None:
            self._hold(plan.reference_digest, reference)
        model = self.get(plan.model_digest)
        if model is None:
            model = broadcast.decode(data, plan, self.get)
            self._hold(plan.model_digest, model)
        return model

    def _hold(self, digest: str, model: Values) -> None:
        self._held[digest] = model
        while len(self._held) > self._size:
            self._held.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, as a restart does."""
        self._held.clear()


@dataclass(frozen=True, slots=True)
class Guard:
    """What a site with real records cannot be without: its operator's limits and its durable ledger."""

    policy: SitePolicy
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class SiteScore:
    """How the model of that digest does on a site's own records. It has no noise: it stays at the site."""

    digest: str
    accuracy: float | None
    loss: float


class Site:
    """One owner of data. The same object everywhere: in a test, in a simulation, behind a daemon.

    A simulated site has no ``guard``: its noise is seeded, so that it protects nobody anyway. A guarded site takes its
    noise from the operating system and from nowhere else.
    """

    def __init__(
        self, data: SiteData, randomness: Randomness, workbench: Workbench, guard: Guard | None = None
    ) -> None:
        if guard is not None and not isinstance(randomness, OsRandomness):
            raise ConfigError(
                f"a site with a ledger must draw its noise from the operating system, got {type(randomness).__name__}: "
                "seeded noise can be taken away again by whoever knows the seed"
            )
        self._data = data
        self._randomness = randomness
        self._workbench = workbench
        self._guard = guard
        self._failed: set[int] = set()  # charges whose round failed in this process

    @property
    def declared_size(self) -> int:
        """The number of records that this site makes public."""
        return self._data.declared_size

    def require_fit(self, name: str) -> None:
        """Raise ModelError or DatasetError unless the model of that name can be trained on this site's records.

        For the site's operator, before anything is served: in a round, a record that the model cannot take would end
        the training, and that it did would tell of the record. Nor would it do to find out there that the model's
        records cannot be clipped one by one: the round is paid for, and its parameters are the server's choice.
        """
        model = self._workbench.model(name)
        inputs, _ = self._data.example(3, model.vector.device)
        model.require_fit(name, inputs, self._data.targets[self._data.rows])
        if self._guard is None or "record" in self._guard.policy.privacy_units:
            require_agreement(model, self._data.example)

    def train(
        self,
        plan_bytes: bytes,
        model_bytes: bytes,
        signature: bytes = b"",
        progress: Callable[[int], None] = lambda steps_done: None,
    ) -> bytes:
        """Carry out a plan from the given model and return the coded update.

        A guarded site checks the plan against its policy and writes the charge down before it trains; a round that was
        carried out before returns the same bytes and costs nothing. ``progress`` may raise TrainingStopped; the charge
        stays, and the same round can be asked for again.

        Raises WireError for bytes that are not a plan or a model, PlanRefused for a plan that this site cannot or will
        not carry out, ModelMissing where the model came as a difference from one that is not held here; in all cases
        nothing was spent. What else goes wrong before the charge is raised as it is. What goes wrong after it may be
        some record's doing: a guarded site logs it, raises NoRelease, and does not train the round again.
        """
        plan = RoundPlan.from_bytes(plan_bytes)
        if self._guard is None:
            return self._release(plan, self._loaded(plan, model_bytes), progress)
        policy, ledger = self._guard.policy, self._guard.ledger
        self._require_own_server(plan_bytes, signature)
        entry = ledger.find(policy.server_key, plan.run, plan.round)
        if entry is None:
            policy.check(plan, ledger.history, ledger.length)
            model = self._loaded(plan, model_bytes)  # whatever is wrong with it must show before the charge
            entry = ledger.charge(plan, plan_bytes, policy.server_key)
        elif entry.plan != hashlib.sha256(plan_bytes).hexdigest():
            raise PlanRefused(
                f"round {plan.round} of run {plan.run!r} was carried out under another plan", for_good=False
            )
        elif (kept := ledger.release_of(entry)) is not None:
            return kept
        elif entry.number in self._failed:
            raise NoRelease
        else:  # charged, but a crash came before the release
            model = self._loaded(plan, model_bytes)
        try:
            release = self._release(plan, model, progress)
            ledger.keep(entry, release)
        except TrainingStopped:
            raise
        except Exception:
            self._failed.add(entry.number)
            log.exception("run %s, round %d failed after its charge", plan.run, plan.round)
            raise NoRelease from None
        return release

    def evaluate(self, plan_bytes: bytes, model_bytes: bytes, signature: bytes = b"") -> SiteScore:
        """Return how a model does on this site's own records: for the site's log alone, since nothing hides a record.

        Only what the policy would let train is tried; raises as ``train`` does.
        """
        plan = RoundPlan.from_bytes(plan_bytes)
        if self._guard is not None:
            self._require_own_server(plan_bytes, signature)
            self._guard.policy.require_model(plan)
        model = self._loaded(plan, model_bytes)
        model.module.eval()
        right: int | None = 0
        loss = 0.0
        try:
            with torch.no_grad():
                for start in range(0, self._data.size, plan.physical_batch_size):
                    rows = np.arange(start, min(start + plan.physical_batch_size, self._data.size))
                    inputs, targets = self._data.batch(rows, model.vector.device)
                    outputs = model.module(model.laid_out(inputs))
                    found = models.right_answers(outputs, targets)
                    right = None if found is None or right is None else right + found
                    loss += float(models.sample_losses(model.module, outputs, targets).sum())
        finally:
            model.module.train()
        count = max(1, self._data.size)
        return SiteScore(plan.model_digest, None if right is None else right / count, loss / count)

    def _require_own_server(self, plan_bytes: bytes, signature: bytes) -> None:
        assert self._guard is not None
        key = self._guard.policy.server_key
        if key and not is_signed_by(key, plan_bytes, signature):
            raise PlanRefused("the plan is not signed by the server that this site obeys")

    def _loaded(self, plan: RoundPlan, model_bytes: bytes) -> models.FlatModel:
        model = self._workbench.model(plan.model)
        step = plan.grid_step(self.declared_size)
        if plan.private and plan.how.calibrated and not _LEAST_STEP <= step <= 1 / _LEAST_STEP:
            raise PlanRefused(
                f"expected a learning rate, noise and grid whose released values have steps of {_LEAST_STEP:g} to "
                f"{1 / _LEAST_STEP:g}, got {step:g}: single precision cannot carry them"
            )
        if model.size != plan.mask.size:
            raise PlanRefused(f"plan speaks of {plan.mask.size} parameters, but {plan.model} has {model.size} here")
        if plan.private and plan.privacy_unit == "record":
            require_agreement(model, self._data.example)
        model.load(self._workbench.shelf.received(plan, model_bytes))
        if plan.how.has_reference:
            reference = self._workbench.shelf.get(plan.reference_digest)
            if reference is None or reference.size != model.size:
                raise PlanRefused(f"expected a reference model of {model.size} parameters with method {plan.method}")
        return model

    def _release(self, plan: RoundPlan, model: models.FlatModel, progress: Callable[[int], None]) -> bytes:
        randomness = self._randomness.for_round(plan.run, plan.round)
        reference = self._workbench.shelf.get(plan.reference_digest)
        upload = train_round(model, self._data, plan, randomness, progress, reference)
        mask, indices = plan.mask, upload.indices
        if indices is None and plan.index_coding_used != "seed":
            indices = mask.indices()
        step, values = plan.grid_step(self.declared_size), upload.values
        if plan.value_coding == "calibrated" and plan.privacy_unit == "client":  # no noise that could be the dither
            values = coding.rounded_at_random(values, step, randomness.open_uniforms(values.size))
        update = SparseUpdate(plan.round, plan.model_version, mask.digest(), mask.size, values, indices)
        return coding.encode(update, plan.value_coding, plan.index_coding_used, step)


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
