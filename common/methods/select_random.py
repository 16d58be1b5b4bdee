"""Choosing coordinates at random: what private choosing is compared with."""

from common.methods.selecting import PAPER, Selecting


class SelectRandom(Selecting):
    """Random coordinates, which cost nothing; all else as in the methods that choose."""

    name = "select-random"
    title = "each site picks coordinates at random; clip, pick, clip again"
    paper = f"{PAPER}, section 6 (random sampling)"
    about = (
        "The baseline of the select methods: the same two clips and the same noise on coordinates that a site draws at "
        "random, in each step or once a round. The draw looks at no data and costs no privacy, but its coordinates are "
        "uploaded; method=random draws them from a seed that all sides share, masks before it clips, and uploads none."
    )
    accounting = "sampled Gaussian"


METHOD = SelectRandom()
