"""Clipping without noise: an ablation, and not private."""

from common.methods.method import Method


class ClipOnly(Method):
    """Clipped SGD with random sparsification."""

    name = "clip-only"
    title = "ablation: mask and clip, no noise; NOT PRIVATE"
    paper = "random-sparsification, Algorithm 3"
    about = (
        "What random sparsification does to SGD where every record is clipped and nothing hides it. Not private: every "
        "output says so, and a site with a ledger refuses it."
    )
    private = False
    lacks = "no noise"
    adds_noise = False
    accounting = "none"
    mechanism = "clip_only"


METHOD = ClipOnly()
