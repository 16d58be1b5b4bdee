"""Measuring the largest entries of the gradient with Laplace noise; the server recovers them."""

import math
from typing import TYPE_CHECKING, Any, ClassVar

from common.charges import Charge
from common.compressive import Measurement, enough_rows
from common.errors import ConfigError
from common.methods.method import Method, Uploads
from common.schedule import DensitySchedule

if TYPE_CHECKING:
    from common.config import RunConfig
    from common.plan import RoundPlan


class Compressive(Method):
    """Pure epsilon-DP: a few random measurements of a sparse gradient, with Laplace noise; CoSaMP at the server."""

    name = "compressive"
    title = "a few noisy random measurements of the gradient's largest entries"
    paper = "compressive-laplace, Algorithms 1 to 3"
    about = (
        "For convex models. In each round a site takes the mean gradient of a sample, clips its entries to entry-bound "
        "(Xi), keeps the kappa = final-density * d largest ones and uploads p = measurements random projections of "
        "them (0: 4 kappa log(d / kappa)) with Laplace noise, of the exact L1 sensitivity of the drawn matrix. "
        "All sides draw it from the public seed. The server averages the measurements of the sites, which is linear, "
        "recovers a kappa-sparse gradient by CoSaMP and takes a step of learning-rate / sqrt(round). The noise "
        "multiplier is the scale of the noise over that sensitivity: a step is (1 / z)-DP, without any delta. Epsilon "
        "is that of all rounds, amplified by sampling: their sum, or less at the delta of the run."
    )
    uploads: ClassVar[Uploads] = "measurements"
    accounting = "sampled Laplace, pure epsilon"
    mechanism = "compressive"
    server = "compressive"

    def check(self, config: "RunConfig") -> None:
        """Require one step a round: the step is taken by the server, from what it recovers."""
        super().check(config)
        if config.steps_per_round != 1:
            raise ConfigError(
                "method=compressive takes its steps at the server, one a round: expected steps-per-round=1, got "
                f"{config.steps_per_round}"
            )
        if not config.private:
            raise ConfigError(
                "method=compressive is about noise on measurements: leave out private=false (--no-dp), or compare with "
                "method=dense --no-dp"
            )
        if config.client_momentum:
            raise ConfigError(
                f"method=compressive has no steps at the sites: expected client-momentum=0, got "
                f"{config.client_momentum:g} (server-optimizer=momentum does the same)"
            )

    def schedule(self, config: "RunConfig") -> DensitySchedule:
        """Return final-density for every epoch: kappa stays what it is."""
        return DensitySchedule("constant", config.final_density, 1, config.rounds_per_epoch)

    def plan_fields(self, config: "RunConfig", noise_multiplier: float, round_number: int) -> dict[str, Any]:
        """Return what is measured."""
        return {"entry_bound": config.entry_bound, "measurements": config.measurements}

    def check_plan(self, plan: "RoundPlan") -> None:
        """Refuse a plan without what a measurement needs, or for a matrix that nobody should be asked to draw."""
        if not (plan.private and plan.entry_bound > 0 and plan.steps == 1):
            raise ConfigError(
                "plan: expected a private plan of one step with entry_bound > 0 for method compressive, got "
                f"private={plan.private}, steps={plan.steps}, entry_bound={plan.entry_bound}"
            )
        _ = self.measurement(plan)  # its own checks

    def measurement(self, plan: "RoundPlan") -> Measurement:
        """Return the matrix of a plan's epoch."""
        rows = plan.measurements or enough_rows(plan.mask_size, plan.mask_kept)
        return Measurement(plan.mask_seed, plan.mask_epoch, plan.mask_size, rows, plan.mask_kept)

    def charge(self, plan: "RoundPlan") -> Charge:
        """Return the cost of one release, which is (1 / z)-DP on its sample."""
        return Charge(math.inf, plan.sampling_rate, plan.steps, pure_epsilon=1 / plan.noise_multiplier)

    def published_epsilon(self, plan: "RoundPlan", rounds: int, declared_size: int, delta: float) -> float | None:
        """Return the paper's epsilon, that of one iteration with sqrt(p) for the norm of the matrix's columns.

        Guarantees: none. Iterations are not composed there, and columns may be longer than sqrt(p).
        Source: compressive-laplace, Algorithm 2 and Proposition 1.
        """
        measurement = self.measurement(plan)
        return math.sqrt(measurement.rows) / measurement.noise_scale(1 / plan.noise_multiplier)

    def noise_std(self, plan: "RoundPlan", declared_size: int) -> float:
        """Return the std of the Laplace noise in a measurement."""
        return math.sqrt(2) * self.measurement(plan).noise_scale(1 / plan.noise_multiplier)

    def model_noise_std(self, config: "RunConfig", plan: "RoundPlan", declared_size: int) -> float:
        """Return the noise that the last round's step, the smallest, adds to a recovered coordinate.

        Columns of the matrix have length 1 on average, so that a coefficient has about the noise of a measurement.
        """
        entry = 2 * plan.entry_bound * plan.mask_kept * self.noise_std(plan, declared_size)
        return plan.learning_rate / math.sqrt(config.rounds) * entry

    def most_values(self, plan: "RoundPlan") -> int:
        """Return p."""
        return self.measurement(plan).rows


METHOD = Compressive()
