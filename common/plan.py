"""RoundPlan: everything that one round asks of a site, and the only thing that a site obeys."""

import json
import math
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from common.charges import Charge, PrivacyUnit
from common.coding import IndexCoding, ValueCoding
from common.errors import ConfigError, WireError
from common.mask import MaskSpec
from common.methods import Method, method_of

_VERSION = 3
_MAX_BYTES = 4096
SelectPer = Literal["step", "round"]


@dataclass(frozen=True, slots=True)
class Range:
    """What a number of a plan may be: from ``least`` to ``most``, or 0 where ``zero`` says that it then means none."""

    least: float
    most: float
    zero: bool = False

    def holds(self, number: float) -> bool:
        """Tell whether a number lies in the range; NaN does not."""
        return self.least <= number <= self.most or (self.zero and number == 0)

    def __str__(self) -> str:
        return f"from {self.least:.10g} to {self.most:.10g}" + (", or 0" if self.zero else "")


# Single precision carries these numbers and learning rate times noise multiplier times clip norm. Outside, arithmetic
# fails for some records and not for others: with a clip norm of 1e39 a step raised only where its batch held a record.
RANGES: dict[str, Range] = {
    "round": Range(1, 2**32 - 1),
    "model_version": Range(0, 2**32 - 1),
    "cohort": Range(1e-6, 1e9),
    "steps": Range(1, 10**6),
    "sampling_rate": Range(1e-9, 1),
    # Squares of numbers far below this are lost in single precision, and with them the norms that are clipped.
    "clip_norm": Range(1e-6, 1e9),
    "noise_multiplier": Range(1e-6, 1e6, zero=True),
    "learning_rate": Range(1e-9, 1e9),
    "momentum": Range(0, 1 - 1e-6),
    "physical_batch_size": Range(1, 2**24),
    # A grid far finer than the noise would show in which order floats were added: see common.randomness.
    "grid": Range(2.0**-6, 2.0**10),
    "model_step": Range(1e-30, 1e30, zero=True),
    "pick_epsilon": Range(1e-9, 1e6, zero=True),
    "pick_threshold": Range(1e-9, 1e9, zero=True),
    "entry_bound": Range(1e-9, 1e9, zero=True),
    "second_clip_norm": Range(1e-9, 1e9, zero=True),
    "measurements": Range(1, 2**24, zero=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """One round, in full. Mechanism and accounting are both built from it, so that they cannot disagree.

    ``sampling_rate`` q, ``clip_norm`` C and ``noise_multiplier`` z are those of each of the ``steps`` noisy updates,
    where the ``privacy_unit`` is the record. Where it is the client, C bounds the whole release, and the server adds
    noise of std z C to the sum over a cohort of ``cohort`` sites on average.
    A plan that is not ``private`` has neither clipping nor noise and cannot be charged.
    ``grid`` is the step of ``calibrated`` values over the std of their noise; ``grid_step`` says what it is over where
    the unit is the client. ``model_digest`` names the model to start from (``common.broadcast.digest_of``), whose
    parameters are multiples of ``model_step``, or any numbers where that is 0.
    ``mask_chosen`` names a mask that the server has chosen; ``mask_draws`` masks of ``mask_drawn_kept`` each are the
    ones of a plan with a mask for every step. ``reference_digest`` names a broadcast model of an earlier round that the
    method needs besides; ``standardised`` values are those of gradients less their mean, over their spread.
    ``select_per``, ``pick_epsilon``, ``pick_threshold`` and ``second_clip_norm`` are those of the select methods,
    ``entry_bound`` that of select-exponential and compressive, ``measurements`` that of compressive; 0 elsewhere.
    """

    run: str
    round: int
    model_version: int
    model: str
    mask_seed: int
    mask_epoch: int
    mask_size: int
    mask_kept: int
    private: bool
    privacy_unit: PrivacyUnit
    cohort: float
    steps: int
    sampling_rate: float
    clip_norm: float
    noise_multiplier: float
    learning_rate: float
    momentum: float
    physical_batch_size: int
    value_coding: ValueCoding
    index_coding: IndexCoding
    grid: float
    model_digest: str
    model_step: float
    method: str = "random"
    mask_chosen: str = ""
    mask_draws: int = 1
    mask_drawn_kept: int = 0
    reference_digest: str = ""
    standardised: bool = False
    select_per: SelectPer = "step"
    pick_epsilon: float = 0.0
    pick_threshold: float = 0.0
    entry_bound: float = 0.0
    second_clip_norm: float = 0.0
    measurements: int = 0

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ConfigError(f"plan: expected {expected}, got {name}={getattr(self, name)!r}")

        check(0 < len(self.run) <= 200, "run", "a run name of 1 to 200 characters")
        check(0 < len(self.model) <= 200, "model", "a model name of 1 to 200 characters")
        for name, allowed in RANGES.items():
            check(allowed.holds(getattr(self, name)), name, f"{name} {allowed}")
        check(self.privacy_unit in get_args(PrivacyUnit), "privacy_unit", f"one of {get_args(PrivacyUnit)}")
        check(not self.private or self.noise_multiplier > 0, "noise_multiplier", "> 0 in a private plan")
        check(self.value_coding in get_args(ValueCoding), "value_coding", f"one of {get_args(ValueCoding)}")
        check(self.private or self.value_coding != "calibrated", "value_coding", "calibrated in a private plan only")
        check(self.index_coding in get_args(IndexCoding), "index_coding", f"one of {get_args(IndexCoding)}")
        check(re.fullmatch("[0-9a-f]{16}", self.model_digest) is not None, "model_digest", "16 hexadecimal digits")
        for name in ("mask_chosen", "reference_digest"):
            digest = getattr(self, name)
            check(re.fullmatch("([0-9a-f]{16})?", digest) is not None, name, "16 hexadecimal digits or none")
        check(self.mask_draws in (1, self.steps), "mask_draws", f"one mask, or one for each of {self.steps} steps")
        known = not self.reference_digest or self.how.has_reference
        check(known, "reference_digest", f"no reference model with method {self.method}")
        check(not self.standardised or bool(self.reference_digest), "standardised", "a reference to standardise by")
        check(not self.mask_chosen or self.mask_draws == 1, "mask_draws", "one, where the mask is chosen")
        check(self.select_per in get_args(SelectPer), "select_per", f"one of {get_args(SelectPer)}")
        check(not self.private or self.how.private, "method", "a private method in a private plan")
        units = self.how.units
        check(self.privacy_unit in units, "privacy_unit", f"one of {units}, which method {self.method} protects")
        seeded = self.index_coding != "seed" or self.how.uploads != "indices and values"
        check(seeded, "index_coding", "compact or raw: no seed gives what a site chooses")
        _ = self.mask  # its own checks
        self.how.check_plan(self)

    @property
    def how(self) -> Method:
        """The method by which this round is carried out and accounted."""
        return method_of(self.method)

    @property
    def mask(self) -> MaskSpec:
        """The mask of this round."""
        return MaskSpec(
            self.mask_seed,
            self.mask_epoch,
            self.mask_size,
            self.mask_kept,
            self.mask_chosen,
            self.mask_draws,
            self.mask_drawn_kept,
        )

    @property
    def index_coding_used(self) -> IndexCoding:
        """How the coordinates of an upload travel: not at all where it has none, as measurements do not."""
        return "seed" if self.how.uploads == "measurements" else self.index_coding

    @property
    def charge(self) -> Charge | None:
        """What this round costs a site that carries it out; None where nothing is private.

        The site counts per record, whatever the unit. Where that is the client, one record more or less replaces the
        site's update by another of norm C at most: the sum changes by 2 C, as if the noise were z / 2; and the site
        knows that it is in the cohort, so that drawing it hides nothing. The server counts per site and less.
        """
        if not self.private:
            return None
        if self.privacy_unit == "client":
            return Charge(self.noise_multiplier / 2, 1.0, 1)
        return self.how.charge(self)

    def grid_step(self, declared_size: int) -> float:
        """Return the step of the grid of ``calibrated`` values, for a site of that size; 0 where nothing is private.

        Where the unit is the client, a release has no noise yet. Two sizes count then: a site's share of the noise that
        the server adds to the sum, z C / sqrt(cohort), and what a coordinate of a clipped movement is on average,
        C / sqrt(kept). On a grid of the smaller one rounding at random adds at most grid^2 / 4 of C^2 to the squared
        norm of a movement, which the server's own clip takes away again: 2 % of its length at 0.5, 7 % at 1.
        """
        if self.privacy_unit == "client":
            share = min(self.noise_multiplier / math.sqrt(self.cohort), 1 / math.sqrt(self.mask_kept))
            return self.grid * self.clip_norm * share
        return self.grid * self.how.noise_std(self, declared_size)

    def to_bytes(self) -> bytes:
        """Return the plan as canonical JSON: sorted keys, no spaces, floats that parse back to the same bits."""
        return json.dumps({"v": _VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "RoundPlan":
        """Parse and check a plan from the wire; anything but exactly the known fields and types is a WireError."""
        if len(data) > _MAX_BYTES:
            raise WireError(f"expected a plan of at most {_MAX_BYTES} bytes, got {len(data)}")
        try:
            raw = json.loads(data)
        except ValueError as error:
            raise WireError(f"plan is not JSON: {error}") from error
        if not isinstance(raw, dict) or raw.pop("v", None) != _VERSION:
            raise WireError(f"expected a plan of version {_VERSION}; update the older of the two sides")
        names = {field.name for field in fields(cls)}
        if raw.keys() != names:
            raise WireError(f"plan has unknown or missing fields: {sorted(raw.keys() ^ names)}")
        try:
            return cls(**{field.name: _typed(field.name, raw[field.name], field.type) for field in fields(cls)})
        except ConfigError as error:
            raise WireError(str(error)) from error


def _typed(name: str, value: Any, expected: Any) -> Any:
    kinds: dict[Any, type] = {
        int: int,
        float: float,
        str: str,
        bool: bool,
        ValueCoding: str,
        IndexCoding: str,
        PrivacyUnit: str,
        SelectPer: str,
    }
    if type(value) is not kinds[expected]:
        raise WireError(f"plan: expected {name} of type {kinds[expected].__name__}, got {value!r}")
    return value
