"""What a method is: the facts that both sides must agree on, in one object."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from common.charges import Charge, PrivacyUnit
from common.errors import ConfigError
from common.noise import release_noise_std
from common.schedule import DensitySchedule

if TYPE_CHECKING:
    from common.config import RunConfig
    from common.plan import RoundPlan

Uploads = Literal["values", "indices and values", "measurements"]


class Method:
    """One way to make updates private and small. Every default is that of random sparsification.

    A method never holds state: what changes from round to round belongs to its server side, what a round needs stands
    in its plan. ``server`` names the module of ``server.methods`` that chooses masks and combines releases,
    ``mechanism`` the module of ``client.mechanisms`` that a site runs.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # what it does, in one line
    paper: ClassVar[str]
    about: ClassVar[str]  # what 'fedsieve methods show' explains
    private: ClassVar[bool] = True
    units: ClassVar[tuple[PrivacyUnit, ...]] = ("record",)
    uploads: ClassVar[Uploads] = "values"
    accounting: ClassVar[str] = "sampled Gaussian"
    calibrated: ClassVar[bool] = True  # whether every released value carries noise of the std ``noise_std``
    lacks: ClassVar[str] = "no clipping, no noise"  # what a run that is not private does without
    adds_noise: ClassVar[bool] = True
    needs_noise: ClassVar[bool] = False  # whether it makes no sense without: private=false is then refused
    has_reference: ClassVar[bool] = False  # whether sites need a second broadcast model (``MethodPolicy.reference``)
    mechanism: ClassVar[str] = "masked"
    server: ClassVar[str] = "random"

    def check(self, config: "RunConfig") -> None:
        """Raise ConfigError where the run config asks for what this method does not do."""
        if config.privacy_unit not in self.units:
            raise ConfigError(
                f"method={self.name} protects a {' or a '.join(self.units)}, got privacy-unit={config.privacy_unit!r}"
            )
        if not self.private and not config.private:
            raise ConfigError(f"method={self.name} is not private by itself: leave out private=false (--no-dp)")
        if self.needs_noise and not config.private:
            raise ConfigError(f"method={self.name} works on released noisy updates: got private=false (--no-dp)")

    def check_plan(self, plan: "RoundPlan") -> None:
        """Raise ConfigError where a plan lacks what this method needs; a site calls it before anything is charged."""

    def schedule(self, config: "RunConfig") -> DensitySchedule:
        """Return the density of each epoch."""
        epochs = -(-config.rounds // config.rounds_per_epoch)
        return DensitySchedule(
            config.density_schedule,
            config.final_density,
            config.cooling_epochs or epochs,
            config.rounds_per_epoch,
            config.first_density,
        )

    def plan_fields(self, config: "RunConfig", noise_multiplier: float, round_number: int) -> dict[str, Any]:
        """Return the fields of a round's plan that are not simply the run config's.

        ``noise_multiplier`` is the run's: as given, or calibrated so that the charges of all rounds meet the budget.
        """
        return {}

    def charge(self, plan: "RoundPlan") -> Charge:
        """Return what a private plan costs a record of a site that carries it out; see ``RoundPlan.charge``."""
        return Charge(plan.noise_multiplier, plan.sampling_rate, plan.steps)

    def noise_std(self, plan: "RoundPlan", declared_size: int) -> float:
        """Return the std of the noise in a released value, from public numbers alone; 0 where ``calibrated`` is not."""
        return release_noise_std(
            noise_multiplier=plan.noise_multiplier,
            clip_norm=plan.clip_norm,
            learning_rate=plan.learning_rate,
            sampling_rate=plan.sampling_rate,
            steps=plan.steps,
            momentum=plan.momentum,
            declared_size=declared_size,
        )

    def model_noise_std(self, config: "RunConfig", plan: "RoundPlan", declared_size: int) -> float:
        """Return the std of the noise that one site's release adds to a coordinate of the mean update."""
        return self.noise_std(plan, declared_size)

    def published_epsilon(self, plan: "RoundPlan", rounds: int, declared_size: int, delta: float) -> float | None:
        """Return what the paper's own analysis would say of ``rounds`` such rounds; None where it is ours as well."""
        return None

    def most_values(self, plan: "RoundPlan") -> int:
        """Return how many values an upload has: exactly, or at most where the site chooses the coordinates."""
        return plan.mask_kept
