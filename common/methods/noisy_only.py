"""Noise without clipping: an ablation, and not private."""

from common.methods.method import Method


class NoisyOnly(Method):
    """Noisy SGD with random sparsification."""

    name = "noisy-only"
    title = "ablation: mask and noise, no clipping; NOT PRIVATE"
    paper = "random-sparsification, Algorithm 2"
    about = (
        "What random sparsification does to noisy SGD where no record is clipped. One record can change the sum by "
        "any amount, so that the noise, which is that of the private run it is compared with, promises nothing. Not "
        "private: every output says so, and a site with a ledger refuses it."
    )
    private = False
    lacks = "no clipping"
    accounting = "none"
    mechanism = "noisy_only"


METHOD = NoisyOnly()
