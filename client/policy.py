"""SitePolicy: the limits that a site's operator sets and no server can loosen. A TOML file, read once at the start."""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from common.accountants import AccountantName
from common.accounting import epsilon_of
from common.charges import History, PrivacyUnit
from common.coding import IndexCoding, ValueCoding
from common.errors import ConfigError, PlanRefused
from common.methods import METHODS
from common.plan import RoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePolicy:
    """What a site allows. The key of ``min_noise_multiplier`` is ``min-noise-multiplier``, and so on.

    ``epsilon`` and ``delta`` are the budget of a record over everything that the ledger has ever seen. ``server_key``
    is the public key whose plans are obeyed; empty obeys unsigned plans, which anyone who reaches the site can write.
    ``max_rounds`` counts the rounds of all runs together. ``value_codings`` other than ``calibrated`` send digits far
    below the noise, where floating point can tell more than the noise hides.
    ``privacy_units`` with ``client`` trusts the server to add the noise: what leaves the site then has none.
    """

    epsilon: float
    delta: float
    accountant: AccountantName = "rdp"
    min_noise_multiplier: float = 0.3
    max_clip_norm: float = math.inf
    max_sampling_rate: float = 1.0
    max_steps_per_round: int = 10_000
    max_rounds: int = 100_000
    models: tuple[str, ...] = field(default=())
    methods: tuple[str, ...] = field(default_factory=lambda: _private_methods())
    privacy_units: tuple[str, ...] = ("record",)
    value_codings: tuple[str, ...] = ("calibrated",)
    index_codings: tuple[str, ...] = get_args(IndexCoding)
    server_key: str = ""

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ConfigError(f"policy: expected {expected}, got {_key(name)}={getattr(self, name)!r}")

        check(0 < self.epsilon < math.inf, "epsilon", "a finite epsilon > 0")
        check(0 < self.delta < 1, "delta", "0 < delta < 1")
        check(self.accountant in get_args(AccountantName), "accountant", f"one of {get_args(AccountantName)}")
        check(self.min_noise_multiplier > 0, "min_noise_multiplier", "a number above 0")
        check(self.max_clip_norm > 0, "max_clip_norm", "a number above 0")
        check(0 < self.max_sampling_rate <= 1, "max_sampling_rate", "0 < max-sampling-rate <= 1")
        check(self.max_steps_per_round >= 1, "max_steps_per_round", "at least 1")
        check(self.max_rounds >= 1, "max_rounds", "at least 1")
        check(len(self.models) > 0, "models", "the names of the models that may be trained here")
        for name, known in (
            ("value_codings", ValueCoding),
            ("index_codings", IndexCoding),
            ("privacy_units", PrivacyUnit),
        ):
            check(set(getattr(self, name)) <= set(get_args(known)), name, f"some of {get_args(known)}")
        private = _private_methods()
        check(set(self.methods) <= set(private), "methods", f"some of the private methods {', '.join(private)}")
        check(re.fullmatch("([0-9a-f]{64})?", self.server_key) is not None, "server_key", "64 hexadecimal digits")

    @classmethod
    def load(cls, path: Path) -> "SitePolicy":
        """Read a policy; unknown keys and wrong types are errors, so that no limit is lost to a typing mistake."""
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the policy {path}: {error}") from error
        try:
            return cls.parse(raw)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "SitePolicy":
        """Parse the keys of a policy file."""
        by_key = {_key(f.name): f for f in fields(cls)}
        unknown = sorted(raw.keys() - by_key.keys())
        if unknown:
            raise ConfigError(f"policy: unknown key {unknown[0]!r}; the keys are {', '.join(by_key)}")
        missing = [key for key in ("epsilon", "delta", "models") if key not in raw]
        if missing:
            raise ConfigError(f"policy: lacks {', '.join(missing)}")
        return cls(**{by_key[key].name: _typed(key, value, by_key[key].type) for key, value in raw.items()})

    def require_model(self, plan: RoundPlan) -> None:
        """Raise PlanRefused unless the plan's model may be used here: its name may lead to code."""
        if plan.model not in self.models:
            allowed = ", ".join(self.models)
            raise PlanRefused(f"the plan's model {plan.model!r} is outside this site's policy: models are {allowed}")

    def check(self, plan: RoundPlan, history: History, rounds: int = 0) -> None:
        """Raise PlanRefused, with the reason, unless this site may carry out ``plan`` after ``history``.

        ``rounds`` is how many rounds, of any run, were charged so far.

        The budget is checked with the plan's own charge added: a plan that would pass it is refused as a whole.
        """

        def require(ok: bool, what: str, limit: str) -> None:
            if not ok:
                raise PlanRefused(f"the plan's {what} is outside this site's policy: {limit}")

        charge = plan.charge
        if charge is None:
            how = "" if plan.how.private else f" (its method is {plan.method})"
            raise PlanRefused(f"the plan is not private{how}, and this site releases nothing without privacy")
        self.require_model(plan)
        require(plan.method in self.methods, f"method {plan.method}", f"one of {', '.join(self.methods)}")
        units = ", ".join(self.privacy_units)
        require(plan.privacy_unit in self.privacy_units, f"privacy unit {plan.privacy_unit}", f"one of {units}")
        least = self.min_noise_multiplier
        require(plan.noise_multiplier >= least, f"noise multiplier {plan.noise_multiplier:g}", f"at least {least:g}")
        require(
            plan.clip_norm <= self.max_clip_norm, f"clip norm {plan.clip_norm:g}", f"at most {self.max_clip_norm:g}"
        )
        rate = self.max_sampling_rate
        require(plan.sampling_rate <= rate, f"sampling rate {plan.sampling_rate:g}", f"at most {rate:g}")
        require(plan.steps <= self.max_steps_per_round, f"{plan.steps} steps", f"at most {self.max_steps_per_round}")
        require(rounds < self.max_rounds, f"round {plan.round}", f"at most {self.max_rounds} rounds over all runs")
        codings = ", ".join(self.value_codings)
        require(plan.value_coding in self.value_codings, f"value coding {plan.value_coding}", f"one of {codings}")
        codings = ", ".join(self.index_codings)
        require(plan.index_coding in self.index_codings, f"index coding {plan.index_coding}", f"one of {codings}")
        spent = epsilon_of((*history, charge), self.delta, self.accountant)
        if spent > self.epsilon:
            before = epsilon_of(history, self.delta, self.accountant)
            raise PlanRefused(
                f"the plan would bring epsilon to {spent:.4g}, above this site's budget of {self.epsilon:g} "
                f"(spent so far: {before:.4g}, at delta {self.delta:g} per record)"
            )


def _private_methods() -> tuple[str, ...]:
    return tuple(name for name, method in METHODS.items() if method.private)


def _key(name: str) -> str:
    return name.replace("_", "-")


def _typed(key: str, value: Any, expected: Any) -> Any:
    if expected == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"policy: expected {key} to be a list of names, got {value!r}")
    kind = {float: (float, int), int: (int,)}.get(expected, (str,))
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ConfigError(f"policy: expected {key} of type {kind[0].__name__}, got {value!r}")
    return float(value) if expected is float else value
