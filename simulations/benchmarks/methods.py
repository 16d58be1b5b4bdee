"""What choosing, recovering and accounting cost at full size, each against a peer that is measured beside it.

Times are the shortest of several: on the wall, and of the CPU, which other work on the machine does not lengthen.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from client.selection import select_exponential
from common.accountants import RdpAccountant
from common.accounting import epsilons_of
from common.charges import Charge
from common.compressive import Measurement, enough_rows, recover
from common.randomness import SecureRandomness

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one piece of work and of its peer."""

    work: str
    wall: float
    cpu: float
    peer: str
    peer_cpu: float


def cost_of(work: str, do: Callable[[], object], peer: str, do_peer: Callable[[], object]) -> Cost:
    """Measure both and return what they took."""
    (wall, cpu), (_, peer_cpu) = _seconds(do), _seconds(do_peer)
    return Cost(work, wall, cpu, peer, peer_cpu)


def choosing(size: int = 1_000_000, picks: int = 1000) -> Cost:
    """Choose coordinates by one-shot Gumbel noise; the peer is the Gaussian noise of a release of them all."""
    mean, randomness = np.random.default_rng(1).normal(size=size), SecureRandomness.fresh()
    return cost_of(
        f"choosing {picks:,} of {size:,} coordinates",
        lambda: select_exponential(
            mean, picks=picks, pick_epsilon=0.1, entry_bound=1.0, record_bound=0.1, randomness=randomness
        ),
        "Gaussian noise on all",
        lambda: randomness.standard_normal(size),
    )


def recovering(size: int = 20_000, sparsity: int = 50) -> Cost:
    """Recover a sparse vector from noisy measurements by CoSaMP; the peer is the product with the matrix, 50 times."""
    rng = np.random.default_rng(1)
    measurement = Measurement(1, 0, size, enough_rows(size, sparsity), sparsity)
    support = np.sort(rng.choice(size, sparsity, replace=False))
    exact = measurement.of(support, rng.normal(size=sparsity))
    measured = exact + 0.01 * np.abs(exact).mean() * rng.laplace(size=measurement.rows)
    columns, vector = measurement.columns(), exact.astype(np.float32)
    return cost_of(
        f"recovering {sparsity} of {size:,} entries from {measurement.rows:,} measurements",
        lambda: recover(measurement, measured),
        f"{sparsity} products with the matrix",
        lambda: [columns @ vector for _ in range(sparsity)],
    )


def accounting(sites: int = 10_000) -> Cost:
    """Account sites whose histories all differ; the peer does one site after the other, a hundred of them."""
    mechanisms = ((1.0, 0.1), (1.5, 0.05), (2.0, 0.2))
    histories = [
        tuple(Charge(z, q, 1 + site * (place + 1)) for place, (z, q) in enumerate(mechanisms)) for site in range(sites)
    ]
    accountant = RdpAccountant()
    return cost_of(
        f"epsilon of {sites:,} sites",
        lambda: epsilons_of(histories, 1e-5),
        "of 100 sites, one by one",
        lambda: [accountant.epsilon(history, 1e-5) for history in histories[:100]],
    )


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the shortest wall and CPU times; the first try only warms up."""
    work()
    walls, cpus = [], []
    for _ in range(_TRIES):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def main() -> None:
    """Measure all three and print them."""
    costs = (choosing(), recovering(), accounting())
    table = Table()
    for heading in ("work", "seconds", "CPU s", "peer", "CPU s"):
        table.add_column(heading, justify="right" if heading.endswith("s") else "left")
    for cost in costs:
        table.add_row(cost.work, f"{cost.wall:.3f}", f"{cost.cpu:.3f}", cost.peer, f"{cost.peer_cpu:.3f}")
    Console().print(table)
    seconds = dict(zip(("choosing", "recovering", "accounting"), costs, strict=True))
    print("BAR " + " ".join(f"{name}_cpu_seconds={cost.cpu:.3f}" for name, cost in seconds.items()))


if __name__ == "__main__":
    main()
