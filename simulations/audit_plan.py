"""The mechanism that an audit attacks: that of a run, or one step of any method, calibrated to a budget."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common import coding
from common.accountants import AccountantName
from common.accounting import calibrate, epsilon_of
from common.charges import Charge, History, PrivacyUnit
from common.config import ConfigValue, RunConfig
from common.errors import ConfigError
from common.methods import method_of
from server.methods import open_policy
from server.planning import planned_history
from server.runfolder import RunFolder
from server.runlog import read_events
from simulations.run import config_with

_MEASURED_SIZE = 50  # parameters of a measured model, where no run says how many

# One round with all coordinates, so that every canary can be seen, is what shows most of nearly every method. These
# need more than that to run at all, or show more with other settings: picks that cost next to nothing beside the noise,
# or eight measurements of one entry. Many tell less than they cost; with few the claim is met with equality, and a
# sound mechanism would be accused once in 20 audits, as often as their confidence allows.
_SHOWS_MOST: dict[str, dict[str, ConfigValue]] = {
    "importance": {"rounds": 2, "warmup-epochs": 1, "first-density": 1.0},
    "select-exponential": {"pick-epsilon": 1e-3},
    "select-sparse-vector": {"pick-epsilon": 1e-5, "pick-threshold": 0.0},
    "select-random": {"second-clip-norm": 0.0},
    "compressive": {"final-density": 1 / _MEASURED_SIZE, "measurements": 8},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """The mechanism that is audited, in the words of a run config.

    ``parameters`` is the size of the audited run's model, 0 where there is no run. Where the *number* of coordinates is
    what costs, canaries are attacked with as many as the run had: see ``density_of``.
    """

    privacy_unit: PrivacyUnit
    noise_multiplier: float
    sampling_rate: float
    steps: int
    rounds: int
    density: float
    value_coding: coding.ValueCoding
    grid: float
    delta: float
    accountant: AccountantName = "rdp"
    method: str = "random"
    parameters: int = 0
    settings: Mapping[str, ConfigValue] = field(default_factory=dict)  # of the method: other run-config keys

    def size(self, canaries: int) -> int:
        """Return the parameters of the model under attack: one per canary, or those that are measured."""
        if method_of(self.method).uploads == "measurements":
            return self.parameters or _MEASURED_SIZE
        return canaries

    def density_of(self, size: int) -> float:
        """Return the density with which a model of ``size`` has the charge of the run.

        That is the run's own, but where a site pays for every coordinate that it picks, as many picks as in the run.
        """
        if method_of(self.method).uploads != "indices and values" or not self.parameters:
            return self.density
        picks = max(1, round(self.density * self.parameters))
        if picks > size:
            raise ConfigError(f"sites pick {picks} coordinates in this run: expected as many canaries, got {size}")
        return picks / size

    def history(self, canaries: int) -> History:
        """Return what the attacked rounds cost; for the client ``sampling_rate`` is that of the cohort."""
        if self.privacy_unit == "client":
            return (Charge(self.noise_multiplier, self.sampling_rate, self.rounds),)
        config = self.config(canaries)
        return planned_history(config, open_policy(config, self.size(canaries)), self.noise_multiplier)

    @property
    def guess_share(self) -> float:
        """The share of the canaries that are guessed: half as in, half as out, those that show most.

        Fewer where the sparse vector technique shows about a third of the coordinates: on the others it would be luck.
        """
        return 0.07 if self.method == "select-sparse-vector" else 0.15

    def claimed_epsilon(self, canaries: int) -> float:
        """Return what the accountant says."""
        return epsilon_of(self.history(canaries), self.delta, self.accountant)

    def config(self, canaries: int) -> RunConfig:
        """Return the run config of the audit's rounds."""
        return config_with(
            {
                "density-schedule": "constant",
                "index-coding": "compact" if method_of(self.method).uploads == "indices and values" else "seed",
                **self.settings,
                "method": self.method,
                "model": "canaries",
                "sites": 1,
                "cohort": 0,
                "min-cohort": 1,
                "privacy-unit": "record",
                "rounds": self.rounds,
                "steps-per-round": self.steps,
                "sampling-rate": self.sampling_rate,
                "final-density": self.density_of(self.size(canaries)),
                "value-coding": self.value_coding,
                "grid": self.grid,
                "delta": self.delta,
                "accountant": self.accountant,
                "clip-norm": 1.0,
                "learning-rate": 1.0,
                "client-momentum": 0.0,
                "physical-batch-size": 4096,
            }
        )


def plan_for(unit: PrivacyUnit, epsilon: float, delta: float, method: str, canaries: int) -> AuditPlan:
    """Return full-batch rounds of a method, calibrated as tightly as can be to (epsilon, delta): where most is seen."""
    how = method_of(method)
    if not how.private or unit not in how.units:
        raise ConfigError(f"method {method} does not protect a {unit}: it claims nothing that could be audited")
    settings = dict(_SHOWS_MOST.get(method, {}))
    rounds, density = settings.pop("rounds", 1), settings.pop("final-density", 1.0)

    def plan(noise_multiplier: float, accountant: AccountantName) -> AuditPlan:
        return AuditPlan(
            privacy_unit=unit,
            noise_multiplier=noise_multiplier,
            sampling_rate=1.0,
            steps=1,
            rounds=int(rounds),
            density=float(density),
            # The likelihood of a measurement is that of the noise alone; on a grid it would be blurred.
            value_coding="f32" if how.uploads == "measurements" else "calibrated",
            grid=0.05,  # too fine to blur even a noise that is far too small
            delta=delta,
            accountant=accountant,
            method=method,
            settings=settings,
        )

    gaussian = all(charge.mechanism.is_gaussian for charge in plan(1.0, "rdp").history(canaries))
    accountant: AccountantName = "prv" if gaussian else "rdp"
    noise_multiplier = calibrate(
        lambda z: plan(z, accountant).history(canaries), epsilon=epsilon, delta=delta, accountant=accountant
    )
    return plan(noise_multiplier, accountant)


def plan_of_run(folder: Path) -> AuditPlan:
    """Return the mechanism of a run, as its log has it; a run that is not private cannot be audited."""
    start = next((event for event in read_events(RunFolder(folder).log) if event["event"] == "run"), None)
    if start is None or not start["private"]:
        raise ConfigError(f"the run in {folder} is not private: it claims nothing that could be audited")
    config = RunConfig.parse(start["config"])
    return AuditPlan(
        privacy_unit=config.privacy_unit,
        noise_multiplier=start["noise_multiplier"],
        sampling_rate=config.cohort_rate if config.privacy_unit == "client" else config.sampling_rate,
        steps=config.steps_per_round,
        rounds=config.rounds,
        density=config.final_density,
        value_coding=config.value_coding_used,
        grid=config.grid,
        delta=config.delta,
        accountant=config.accountant,
        method=config.method,
        parameters=start["parameters"],
        settings={
            key: value
            for key, value in config.to_mapping().items()
            if key not in ("name", "out", "resume", "dataset", "partition", "server-key", "weighting")
        },
    )
