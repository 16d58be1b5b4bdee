"""Ranked sparsification: the coordinates that moved most in the last epoch."""

from typing import ClassVar

from common.charges import PrivacyUnit
from common.methods.method import Method


class Ranked(Method):
    """The server ranks what was released; the mask travels down once per epoch."""

    name = "ranked"
    title = "the coordinates that the last epoch's released updates moved most"
    paper = "random-sparsification, Algorithm 4"
    about = (
        "The server adds up the mean updates that an epoch released and keeps the coordinates with the largest sums "
        "for the next one. Coordinates that were frozen get fresh noise of the same scale as their score, else they "
        "would never return. Only released quantities are ranked: post-processing, which costs no privacy. The mask is "
        "not a function of the seed, so it travels down, once per epoch, in the compact index coding; its digest "
        "stands in the signed plan. Before there is anything to rank, masks are random. The paper finds that it equals "
        "random."
    )
    units: ClassVar[tuple[PrivacyUnit, ...]] = ("record", "client")
    needs_noise = True
    server = "ranked"


METHOD = Ranked()
