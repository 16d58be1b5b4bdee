"""Who takes part: nodes join, say which site they are, and a cohort is drawn for each round."""

import hashlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from common.errors import FederationError, WireError
from common.randomness import RoundRandomness
from common.records import Introduction


@dataclass(frozen=True, slots=True)
class Member:
    """A site that takes part. Node ids change from run to run; the site's number does not."""

    site: int
    node_id: int
    declared_size: int
    simulated: bool


def join(grid: Grid, sites: int, timeout: float) -> list[Member]:
    """Wait for ``sites`` nodes, ask each who it is, and return them in order of their site number."""
    deadline = time.monotonic() + timeout
    while len(node_ids := sorted(grid.get_node_ids())) < sites:
        if time.monotonic() > deadline:
            raise FederationError(
                f"expected {sites} nodes to join within {timeout:g} s, got {len(node_ids)}: start the missing ones, or "
                "lower 'sites' in the run config"
            )
        time.sleep(0.2)
    nothing = RecordDict()  # one for all: engines send equal contents once
    questions = [Message(nothing, node_id, "query", ttl=timeout) for node_id in node_ids]
    members: dict[int, Member] = {}
    problems: list[str] = []
    for reply in grid.send_and_receive(questions, timeout=timeout):
        node_id = reply.metadata.src_node_id
        try:
            if reply.has_error():
                raise WireError(reply.error.reason or "no reason given")
            introduction = Introduction.from_content(reply.content)
        except WireError as error:
            problems.append(f"node {node_id}: {error}")
            continue
        if introduction.site in members:
            problems.append(f"node {node_id}: site {introduction.site} has joined already")
            continue
        members[introduction.site] = Member(
            introduction.site, node_id, introduction.declared_size, introduction.simulated
        )
    if len(members) < sites:
        raise FederationError(
            f"expected {sites} sites, but only {len(members)} introduced themselves"
            + "".join(f"\n  {problem}" for problem in problems[:5])
        )
    return [members[site] for site in sorted(members)]


def draw_cohort(members: Sequence[Member], seed: int, round_number: int, count: int) -> list[Member]:
    """Return the ``count`` members of a round, in order of their site number.

    Every site gets a rank SHA-256(seed, round, site) and the smallest ranks are taken: the draw depends on the sites
    that take part, not on the order or the names in which Flower knows them.
    """

    def rank(member: Member) -> bytes:
        return hashlib.sha256(b"fedsieve/cohort/1" + struct.pack("<QQQ", seed, round_number, member.site)).digest()

    return sorted(sorted(members, key=rank)[:count], key=lambda member: member.site)


def draw_secret_cohort(members: Sequence[Member], rate: float, randomness: RoundRandomness) -> list[Member]:
    """Return each member with probability ``rate``, independently: nobody but the server may know who was drawn."""
    return [members[number] for number in randomness.poisson_sample(len(members), rate)]
