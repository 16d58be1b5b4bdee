"""A test build of the site's daemon: everything real but the noise, which is that of a simulated site.

Run as ``python -m tests.deployment.seeded_site SEED SITE`` with the options of ``fedsieve site serve``.
"""

import sys

from client import randomness
from common.randomness import RoundRandomness
from simulations.cli import main
from simulations.seeded import SeededRandomness


class SeededOsRandomness(randomness.OsRandomness):
    """Claims to be the operating system's, and is not: a guarded site takes nothing else."""

    def __init__(self) -> None:
        self._seeded = SeededRandomness(int(sys.argv[1]), int(sys.argv[2]))

    def for_round(self, run: str, round_number: int) -> RoundRandomness:  # type: ignore[override]
        return self._seeded.for_round(run, round_number)


if __name__ == "__main__":
    randomness.OsRandomness = SeededOsRandomness  # type: ignore[misc]
    sys.exit(main(["site", "serve", *sys.argv[3:]]))
