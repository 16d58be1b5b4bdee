"""DP-SGD: every coordinate moves in every round."""

from typing import TYPE_CHECKING, ClassVar

from common.charges import PrivacyUnit
from common.methods.method import Method
from common.schedule import DensitySchedule

if TYPE_CHECKING:
    from common.config import RunConfig


class Dense(Method):
    """DP-SGD without a mask, for comparison."""

    name = "dense"
    title = "DP-SGD: every coordinate in every round"
    paper = "Abadi et al., Deep learning with differential privacy (2016)"
    about = (
        "What sparsification is compared with: a record's whole gradient is clipped to clip-norm and every coordinate "
        "gets noise. final-density, cooling-epochs and density-schedule do nothing."
    )
    units: ClassVar[tuple[PrivacyUnit, ...]] = ("record", "client")

    def schedule(self, config: "RunConfig") -> DensitySchedule:
        """Return density 1 for every epoch."""
        return DensitySchedule("constant", 1.0, 1, config.rounds_per_epoch)


METHOD = Dense()
