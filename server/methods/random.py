"""Masks from the public seed: a fresh one for every epoch, of the density that the schedule gives it."""

from server.methods.policy import MethodPolicy


class Policy(MethodPolicy):
    """Random sparsification, and every method that shares its masks."""
