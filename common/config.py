"""The run config: parsed once from Flower's flat mapping, then frozen, typed and checked.

Defaults are written in ``pyproject.toml`` under ``[tool.flwr.app.config]`` and nowhere else.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

from common.accountants import AccountantName
from common.charges import PrivacyUnit
from common.coding import IndexCoding, ModelCoding, ValueCoding
from common.errors import ConfigError
from common.methods import Method, method_of
from common.plan import RANGES, SelectPer
from common.schedule import DensitySchedule, ScheduleKind

# Keys that every plan of the run repeats, and what they are called there.
_PLANNED = {
    "steps_per_round": "steps",
    "client_momentum": "momentum",
    **{name: name for name in ("sampling_rate", "clip_norm", "noise_multiplier", "learning_rate", "grid")},
    **{name: name for name in ("physical_batch_size", "measurements", "second_clip_norm")},
    **{name: name for name in ("pick_epsilon", "pick_threshold", "entry_bound")},
}

ServerOptimizerName = Literal["sgd", "momentum", "adam"]
Weighting = Literal["uniform", "size"]
ConfigValue = bool | int | float | str


def _about(text: str) -> Any:
    """Declare a config field with the sentence that ``fedsieve simulate --help`` shows for it."""
    return field(metadata={"about": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Every key of a run. The key of ``clip_norm`` is ``clip-norm``, and so on."""

    name: str = _about("name of the run and of its folder; empty: made from dataset, model and seed")
    out: str = _about("folder that holds the folders of runs")
    seed: int = _about("public seed: masks, cohorts, first model (and, in simulations alone, sampling and noise)")
    resume: bool = _about("continue the run of this name from its checkpoint")
    restart: bool = _about("the same, but begin where there is no checkpoint yet ('fedsieve deploy run' sets it)")

    dataset: str = _about("name, folder or .npz file of a data set, or package.module:function")
    partition: str = _about("how a simulation splits it: iid, dirichlet:ALPHA, labels:PER_SITE, sizes:zipf")
    model: str = _about("name of a model of the zoo, or package.module:function")
    device: str = _about("where sites train: auto (CUDA when present), cpu, cuda, cuda:1, ...")

    method: str = _about("how updates are made private and small: see 'fedsieve methods'")

    rounds: int = _about("rounds of the whole run")
    sites: int = _about("sites that take part; the run starts when that many nodes have joined")
    cohort: int = _about("sites asked in each round; 0: all of them")
    min_cohort: int = _about("fewest admitted replies for a round to count; with fewer it is abandoned")
    round_deadline: float = _about("seconds to wait for the replies of a round")

    server_key: str = _about("file of the key that signs plans ('fedsieve keys server'); empty: plans are not signed")

    private: bool = _about("false: no clipping, no noise, no privacy; every output says so")
    privacy_unit: PrivacyUnit = _about(
        "record (sites add the noise) or client (a whole site; a trusted server adds it)"
    )
    epsilon: float = _about("privacy budget of a record, or of a client, over the whole run")
    delta: float = _about("probability with which the budget may fail")
    noise_multiplier: float = _about("noise std over clip norm; 0: calibrated from epsilon")
    accountant: AccountantName = _about("rdp, prv (tighter, slower) or pld (tightest, slowest; an extra)")
    clip_norm: float = _about("largest norm of a record's masked gradient")
    sampling_rate: float = _about("probability that a record is in a step's batch")

    steps_per_round: int = _about("noisy updates that a site makes in a round")
    learning_rate: float = _about("learning rate of the sites")
    client_momentum: float = _about("momentum of the sites; the velocity lives on the mask and for one round")
    physical_batch_size: int = _about("records whose gradients are held in memory at once; changes no result")

    density_schedule: ScheduleKind = _about(
        "cooling (from dense to the final density), constant, or unfreezing (from the first density to the final)"
    )
    first_density: float = _about("fraction of the coordinates that move when unfreezing begins")
    final_density: float = _about("fraction of the coordinates that move at the end of the cooling")
    cooling_epochs: int = _about("epochs until the final density is reached; 0: the whole run")
    warmup_epochs: int = _about("dense epochs from which method importance learns what matters; part of the budget")
    rounds_per_epoch: int = _about("rounds that share a mask")
    value_coding: ValueCoding = _about("how a value travels: calibrated (to the noise), f32, f16 or int8")
    grid: float = _about(
        "step of calibrated values over the std of their noise: 0.5 costs 3.1 bits a value, 1 costs 2.1 (where the "
        "unit is the client values have no noise yet: see docs/bytes.md; at most 1)"
    )
    index_coding: IndexCoding = _about("how kept coordinates travel: seed (not at all), raw or compact")
    downlink_coding: ModelCoding = _about("how the model travels: calibrated (differences), f32 or f16")
    downlink_grid: float = _about("step of a calibrated model over the noise that a round adds to it")

    select_per: SelectPer = _about("how often the select methods choose coordinates: in each step, or once a round")
    pick_epsilon: float = _about("epsilon of picking one coordinate, before sampling (select methods)")
    pick_threshold: float = _about("magnitude of the mean gradient that select-sparse-vector looks for")
    entry_bound: float = _about("largest magnitude of an entry of the mean gradient (select-exponential, compressive)")
    second_clip_norm: float = _about("largest norm of the chosen coordinates of the mean gradient; 0: no second clip")
    measurements: int = _about("values that method compressive uploads; 0: 4 kappa log(d / kappa)")

    weighting: Weighting = _about("mean over sites: uniform, or by the size that a site declares")
    server_optimizer: ServerOptimizerName = _about("sgd, momentum or adam, on the kept coordinates")
    server_learning_rate: float = _about("learning rate of the server; 1 with sgd is plain averaging")
    server_momentum: float = _about("momentum of the server (momentum, and beta1 of adam)")
    server_averaging: float = _about("decay of the average over rounds that is evaluated and kept; 0: the last model")

    evaluate_every: int = _about("rounds between evaluations on the server's test set; 0: never")

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ConfigError(f"expected {expected}, got {key_of(name)}={getattr(self, name)!r}")

        for name in ("rounds", "sites", "min_cohort", "rounds_per_epoch"):
            check(getattr(self, name) >= 1, name, "at least 1")
        for name in ("cohort", "cooling_epochs", "warmup_epochs", "evaluate_every"):
            check(getattr(self, name) >= 0, name, "0 or more")
        for name in (
            "epsilon",
            "server_learning_rate",
            "round_deadline",
            "downlink_grid",
            "pick_epsilon",
            "entry_bound",
        ):
            value = getattr(self, name)
            check(value > 0 and math.isfinite(value), name, "a finite number above 0")
        for name, in_plan in _PLANNED.items():
            check(RANGES[in_plan].holds(getattr(self, name)), name, f"a number {RANGES[in_plan]}")
        check(0 < self.delta < 1, "delta", "0 < delta < 1")
        check(0 < self.final_density <= 1, "final_density", "0 < final-density <= 1")
        check(0 < self.first_density <= 1, "first_density", "0 < first-density <= 1")
        check(0 <= self.server_momentum < 1, "server_momentum", "0 <= server-momentum < 1")
        check(0 <= self.server_averaging < 1, "server_averaging", "0 <= server-averaging < 1")
        check(0 <= self.seed < 2**63, "seed", "0 <= seed < 2^63")
        check(
            self.privacy_unit == "record" or self.weighting == "uniform",
            "weighting",
            "uniform, so that no site counts more than its clip norm, where the privacy unit is the client",
        )
        check(
            self.privacy_unit == "record" or self.value_coding != "calibrated" or self.grid <= 1,
            "grid",
            "at most 1 where the privacy unit is the client: coarser rounding makes uploads longer than the clip norm",
        )
        check(self.cohort <= self.sites, "cohort", f"at most the {self.sites} sites")
        check(self.min_cohort <= self.cohort_size, "min_cohort", f"at most the cohort of {self.cohort_size}")
        check(bool(self.name) or not self.restart, "name", "a name where restart=true, so that it can be found again")
        check("/" not in self.name and self.name not in (".", ".."), "name", "a folder's name without '/'")
        check(len(self.run_name) <= 200, "name", "at most 200 characters")
        self.how.check(self)
        _ = self.schedule  # its own checks

    @property
    def run_name(self) -> str:
        """The run's name: as given, or one that says what runs."""
        if self.name:
            return self.name
        kind = f"eps{self.epsilon:g}" if self.is_private else "not-private"
        if self.method != "random":
            kind = f"{self.method}-{kind}"
        dataset = self.dataset.rstrip("/").rsplit("/", 1)[-1]
        return f"{dataset}-{self.model}-{kind}-density{self.final_density:g}-seed{self.seed}".replace(":", "_")

    @property
    def how(self) -> Method:
        """The method of the run."""
        return method_of(self.method)

    @property
    def is_private(self) -> bool:
        """Whether what the run releases is differentially private."""
        return self.private and self.how.private

    @property
    def cohort_size(self) -> int:
        """How many sites a round asks."""
        return self.cohort or self.sites

    @property
    def cohort_rate(self) -> float:
        """The share of the sites that a round asks."""
        return self.cohort_size / self.sites

    @property
    def value_coding_used(self) -> ValueCoding:
        """The value coding of the run's plans: f16 stands in where there is no noise to calibrate to."""
        return "f16" if self.value_coding == "calibrated" and not self._calibrated else self.value_coding

    @property
    def released_noise_is_coded(self) -> bool:
        """Whether values travel on a grid of their own noise: what they cost at least is then known beforehand."""
        return self.value_coding_used == "calibrated" and self.privacy_unit == "record"

    @property
    def index_coding_used(self) -> IndexCoding:
        """The index coding of the run's plans: compact stands in where no seed gives what a site chose."""
        chosen = self.how.uploads == "indices and values"
        return "compact" if self.index_coding == "seed" and chosen else self.index_coding

    @property
    def downlink_coding_used(self) -> ModelCoding:
        """The coding of the run's models: f16 stands in where there is no noise to calibrate to."""
        return "f16" if self.downlink_coding == "calibrated" and not self._calibrated else self.downlink_coding

    @property
    def _calibrated(self) -> bool:
        return self.is_private and self.how.calibrated

    @property
    def schedule(self) -> DensitySchedule:
        """The density of each epoch."""
        return self.how.schedule(self)

    @classmethod
    def parse(cls, mapping: Mapping[str, ConfigValue]) -> "RunConfig":
        """Parse Flower's run config: exactly the known keys, each of its type."""
        by_key = {key_of(f.name): f for f in fields(cls)}
        for key in mapping:
            if key not in by_key:
                raise ConfigError(f"unknown run-config key {key!r}{_did_you_mean(key, by_key)}")
        missing = sorted(by_key.keys() - mapping.keys())
        if missing:
            raise ConfigError(
                f"run config lacks {', '.join(missing)}: give them, or start from pyproject.toml's defaults"
            )
        return cls(**{f.name: _typed(key, mapping[key], f.type) for key, f in by_key.items()})

    def to_mapping(self) -> dict[str, ConfigValue]:
        """Return the flat mapping that ``parse`` takes."""
        return {key_of(name): value for name, value in asdict(self).items()}


def key_of(field_name: str) -> str:
    """Return the run-config key of a field."""
    return field_name.replace("_", "-")


def describe_keys() -> dict[str, str]:
    """Return what each run-config key means."""
    return {key_of(f.name): f.metadata["about"] for f in fields(RunConfig)}


def parse_assignment(text: str, defaults: Mapping[str, ConfigValue]) -> tuple[str, ConfigValue]:
    """Parse ``key=value`` as typed on a command line, with the type that the key's default has."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise ConfigError(f"expected key=value, got {text!r}")
    if key not in defaults:
        raise ConfigError(f"unknown run-config key {key!r}{_did_you_mean(key, defaults)}")
    default = defaults[key]
    try:
        if isinstance(default, bool):
            return key, {"true": True, "false": False}[value.lower()]
        return key, type(default)(value)
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(default, bool) else f"a value of type {type(default).__name__}"
        raise ConfigError(f"expected {kind} for {key}, got {value!r}") from None


def _did_you_mean(key: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key.replace("_", "-"), list(known), n=1)
    return f": did you mean {close[0]!r}?" if close else f"; the keys are {', '.join(sorted(known))}"


def _typed(key: str, value: ConfigValue, expected: Any) -> Any:
    if get_origin(expected) is Literal:
        if value not in get_args(expected):
            raise ConfigError(f"expected {key} to be one of {', '.join(get_args(expected))}, got {value!r}")
        return value
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise ConfigError(f"expected {key} of type {expected.__name__}, got {value!r}")
    return value
