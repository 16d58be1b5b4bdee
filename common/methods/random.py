"""Random sparsification: the core."""

from typing import ClassVar

from common.charges import PrivacyUnit
from common.methods.method import Method


class Random(Method):
    """Mask, then clip, then noise on the kept coordinates; a fresh random mask every epoch."""

    name = "random"
    title = "a fresh random mask every epoch; mask, clip, noise on what is kept"
    paper = "random-sparsification, Algorithm 1; random-freeze (cooling time)"
    about = (
        "Every side draws the mask of an epoch from one public seed, so that no index travels. A record's gradient is "
        "masked, then clipped to clip-norm; noise falls on the kept coordinates alone. The mask never looks at data: "
        "privacy is that of DP-SGD with the same noise, sampling rate and number of steps. With the cooling schedule "
        "the first epoch is dense and the density falls to final-density over cooling-epochs."
    )
    units: ClassVar[tuple[PrivacyUnit, ...]] = ("record", "client")


METHOD = Random()
