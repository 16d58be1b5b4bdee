"""Posterior sparsification: clip the whole gradient, then mask."""

from common.methods.method import Method


class Posterior(Method):
    """The weaker order of the two: what the mask takes away has already cost a part of the clip norm."""

    name = "posterior"
    title = "a random mask every epoch, after the clip: clip, mask, noise on what is kept"
    paper = "random-freeze (posterior freeze)"
    about = (
        "A record's whole gradient is clipped to clip-norm, and only then masked. The masked sum changes by at most "
        "clip-norm with a record, so that noise, charge and upload are those of random; but the kept coordinates of a "
        "clipped record are smaller, since those off the mask took their part of the norm. A baseline for 'random'."
    )
    mechanism = "posterior"


METHOD = Posterior()
