from collections.abc import Callable

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from common.errors import FederationError
from common.records import Introduction
from server.federation import Member, draw_cohort, join
from simulations.grid import InProcessGrid

MEMBERS = [Member(site, 1000 - site, 10 + site, simulated=True) for site in range(20)]


def grid_where(introduce: Callable[[int], Introduction], sites: int = 4) -> InProcessGrid:
    app = ClientApp()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        return Message(introduce(int(context.node_config["partition-id"])).to_content(), reply_to=message)

    return InProcessGrid(app, sites, {})


def test_members_come_in_order_of_their_site() -> None:
    members = join(grid_where(lambda number: Introduction(3 - number, 50 + number, number == 0)), 4, timeout=5)
    assert [(member.site, member.declared_size) for member in members] == [(0, 53), (1, 52), (2, 51), (3, 50)]
    assert [member.simulated for member in members] == [False, False, False, True]


def test_missing_sites_and_impostors_stop_the_run_before_it_starts() -> None:
    with pytest.raises(FederationError, match=r"expected 5 nodes to join within 0\.1 s, got 4"):
        join(grid_where(lambda number: Introduction(number, 1, True)), 5, timeout=0.1)
    with pytest.raises(FederationError, match=r"only 1 introduced themselves\n.*site 0 has joined already"):
        join(grid_where(lambda number: Introduction(0, 1, True)), 4, timeout=5)

    def fails(number: int) -> Introduction:
        raise RuntimeError("no data here")

    with pytest.raises(FederationError, match="no data here"):
        join(grid_where(fails), 4, timeout=5)


def test_a_cohort_depends_on_seed_round_and_sites_alone() -> None:
    drawn = draw_cohort(MEMBERS, 1, 3, 5)
    shuffled = [Member(m.site, 7 * m.site, m.declared_size, m.simulated) for m in reversed(MEMBERS)]
    assert [m.site for m in draw_cohort(shuffled, 1, 3, 5)] == [m.site for m in drawn]
    assert [m.site for m in drawn] == sorted({m.site for m in drawn}) and len(drawn) == 5
    others = [[m.site for m in draw_cohort(MEMBERS, seed, r, 5)] for seed, r in [(1, 4), (2, 3)]]
    assert [m.site for m in drawn] not in others


def test_everybody_is_drawn_equally_often() -> None:
    counts = [0] * 20
    for round_number in range(2000):
        for member in draw_cohort(MEMBERS, 1, round_number, 5):
            counts[member.site] += 1
    assert min(counts) > 420 and max(counts) < 580  # 500 expected, standard deviation 19


def test_a_whole_cohort() -> None:
    assert draw_cohort(MEMBERS, 1, 1, 20) == MEMBERS
