"""The Flower Strategy: glue between Flower's rounds and the parts of the server."""

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from common.accounting import Charge
from common.coding import PartBytes, Values
from common.config import RunConfig
from common.errors import FederationError
from common.mask import Indices
from common.plan import RoundPlan
from common.randomness import RoundRandomness
from common.records import Request, message_bytes
from common.signing import PlanSigner
from server.admission import AdmittedUpdate, Rejection, admit, wants_model
from server.aggregate import ModelAverage, ServerOptimizer, noisy_mean
from server.downlink import Downlink
from server.evaluation import Score
from server.federation import Member, draw_cohort, draw_secret_cohort
from server.grid import is_away
from server.methods.policy import MethodPolicy
from server.planning import round_plan
from server.privacy import PrivacyAccount
from server.runlog import RunLog
from server.traffic import Traffic

_MODEL_ARRAY = "model"
_LEAST_SHARE = 0.2  # of a round's time, for a site that is asked once more
_PATIENCE = 90.0  # seconds for a node to come back that went away in the middle of a round


@dataclass(slots=True)
class SiteCounts:
    """How often a site's replies were admitted and rejected; why it is asked no more, if it is not."""

    admitted: int = 0
    rejected: int = 0
    dropped: str = ""


@dataclass(slots=True)
class ServerState:
    """What changes from round to round, and must survive a restart."""

    optimizer: ServerOptimizer
    average: ModelAverage
    privacy: PrivacyAccount
    traffic: Traffic
    # Tells this run from an earlier one of the same name, of which sites may remember the rounds.
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    rounds_done: int = 0
    model_version: int = 0
    seconds: float = 0.0
    counts: dict[int, SiteCounts] = field(default_factory=dict)


@dataclass(slots=True)
class _OpenRound:
    """What is known of a round between asking and aggregating."""

    plan: RoundPlan
    cohort: list[Member]
    started: float
    present: frozenset[int]  # nodes that were there when the round began
    rejections: dict[int, Rejection] = field(default_factory=dict)
    admitted: dict[int, AdmittedUpdate] = field(default_factory=dict)
    abandoned: bool = False


class SparseDpStrategy(Strategy):
    """Asks a cohort for sparse private updates, admits them one by one, and averages them on the mask."""

    def __init__(
        self,
        *,
        run_name: str,
        config: RunConfig,
        noise_multiplier: float,
        members: Sequence[Member],
        policy: MethodPolicy,
        downlink: Downlink,
        signer: PlanSigner | None,
        state: ServerState,
        log: RunLog,
        evaluate: Callable[[Values], Score | None],
        save: Callable[[Values], None],
        randomness: Callable[[int], RoundRandomness],
    ) -> None:
        self._run_name = run_name
        self._config = config
        self._noise_multiplier = noise_multiplier
        self._members = members
        self._policy = policy
        self._downlink = downlink
        self._signer = signer
        self._state = state
        self._log = log
        self._evaluate = evaluate
        self._save = save
        self._randomness_of = randomness
        self._randomness = randomness(0)
        self._by_client = config.is_private and config.privacy_unit == "client"
        self._model = np.empty(0, np.float32)
        self._open: _OpenRound | None = None

    def summary(self) -> None:
        """Log what the run is, in one line."""
        config = self._config
        privacy = f"epsilon {config.epsilon:g} per {config.privacy_unit}" if config.is_private else "NOT PRIVATE"
        log(INFO, "fedsieve: %s, %d sites, %s", self._run_name, len(self._members), privacy)

    def plan(self, round_number: int) -> RoundPlan:
        """Return what a round asks of every site of its cohort."""
        return round_plan(
            self._config,
            run=f"{self._run_name}#{self._state.run_id}",
            round_number=round_number,
            mask=self._policy.mask(round_number),
            noise_multiplier=self._noise_multiplier,
            model_version=self._state.model_version,
            model_digest=self._downlink.digest,
            model_step=self._downlink.step,
            reference_digest=self._downlink.reference_digest,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Plan the round and address it to its cohort."""
        self._model = _vector(arrays)
        plan = self.plan(server_round)
        self._downlink.use_mask(plan.mask)
        self._randomness = self._randomness_of(server_round)
        if self._by_client:
            cohort = draw_secret_cohort(self._remaining(), self._config.cohort_rate, self._randomness)
        else:
            cohort = draw_cohort(self._remaining(), self._config.seed, server_round, self._config.cohort_size)
        self._open = _OpenRound(plan, cohort, time.monotonic(), frozenset(grid.get_node_ids()))
        self._state.traffic.begin_round()
        return self._address(self._open, cohort, self._config.round_deadline)

    def _address(
        self, current: _OpenRound, members: Sequence[Member], ttl: float, *, again: bool = False
    ) -> list[Message]:
        """Return the round's messages to ``members``; those who hold the same model share one content."""
        plan = current.plan.to_bytes()
        signature = b"" if self._signer is None else self._signer.sign(plan)
        by_model: dict[int, list[Member]] = {}
        for member in members:
            by_model.setdefault(id(self._downlink.bytes_for(member.site)), []).append(member)
        messages = []
        for group in by_model.values():
            model = self._downlink.bytes_for(group[0].site)
            content = Request(plan, model, signature).to_content()
            addressed = [Message(content, m.node_id, "train", ttl=ttl, group_id=str(current.plan.round)) for m in group]
            # The content is the same for all of a group: what the first message costs, every one costs.
            payload = self._downlink.parts_of(model) + PartBytes(header=len(plan) + len(signature))
            framing = message_bytes(addressed[0]) - payload.total
            for member in group:
                self._state.traffic.sent(member.site, payload + PartBytes(framing=framing), again=again)
            messages += addressed
        return messages

    def _answers_in_full(self, grid: Grid, replies: Iterable[Message], deadline: float) -> Iterator[Message]:
        """Yield the replies, and those of sites that had to be asked once more.

        These are sites that wanted the whole model, and sites whose node went away while they were asked: they may have
        been charged, and give the same release for the same charge once the node is back.
        """
        current = self._open
        assert current is not None
        by_node = {member.node_id: member for member in current.cohort}
        wanting: list[Member] = []
        away: list[Member] = []
        for reply in replies:
            member = by_node.get(reply.metadata.src_node_id)
            if member is not None and wants_model(reply):
                self._state.traffic.received(member.site, PartBytes(framing=message_bytes(reply)), update=False)
                self._downlink.forget(member.site)
                wanting.append(member)
            elif member is not None and member.node_id in current.present and is_away(reply):
                away.append(member)
            else:
                yield reply
        least = _LEAST_SHARE * self._config.round_deadline
        back = _returned(grid, away, min(time.monotonic() + _PATIENCE, deadline - least)) if away else []
        left = deadline - time.monotonic()
        # With hardly any time left a site would train, and be charged, for an answer that comes too late.
        if left <= least:
            for member in wanting:
                current.rejections[member.site] = Rejection("wanted the whole model too late in the round", spent=False)
        elif wanting or back:
            yield from grid.send_and_receive(self._address(current, [*wanting, *back], left, again=True), timeout=left)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Admit or reject every reply, then move the model along the mean of the admitted updates."""
        current = self._open
        assert current is not None, "aggregate_train follows configure_train"
        by_node = {member.node_id: member for member in current.cohort}
        for reply in replies:
            member = by_node.get(reply.metadata.src_node_id)
            if member is not None:  # Flower delivers replies of asked nodes only; anything else is not ours to count
                self._take_reply(current, member, reply)
        self._charge(current)
        for site in current.rejections.keys() - current.admitted.keys():
            self._counts(site).rejected += 1
            if current.rejections[site].for_good:
                self._counts(site).dropped = current.rejections[site].reason
        for site in current.admitted:
            self._counts(site).admitted += 1
            self._downlink.confirm(site)  # it has answered from the model of this round
        # How many were drawn is a secret where the unit is the client: then a round counts with however few.
        current.abandoned = not self._by_client and len(current.admitted) < self._config.min_cohort
        if current.abandoned:
            return None, None
        by_site = [member for member in current.cohort if member.site in current.admitted]
        indices, mean = self._mean(current, by_site)
        self._policy.learn(current.plan, indices, mean, self._noise_std(current.plan, by_site))
        model = self._state.optimizer.step(self._model, indices, mean)
        self._state.model_version += 1
        # Where sites choose the coordinates, nobody but the server knows which ones have moved.
        moved = current.plan.mask if current.plan.how.uploads == "values" else None
        self._downlink.publish(model, self._state.model_version, moved)
        self._state.average.add(model)
        return _record(model), None

    def _mean(self, current: _OpenRound, members: Sequence[Member]) -> tuple[Indices, Values]:
        """Return where the model moves and the mean update of the admitted ``members`` there.

        Noisy where the unit is the client.
        """
        plan, admitted = current.plan, current.admitted
        if not self._by_client:
            return self._policy.combine(
                plan, [(admitted[m.site], self._weight(m)) for m in members], self._downlink.model
            )
        updates = [admitted[m.site].values for m in members]
        noise_std = plan.noise_multiplier * plan.clip_norm
        mean = noisy_mean(updates, plan.mask.kept, plan.clip_norm, noise_std, plan.cohort, self._randomness)
        return plan.mask.indices(), mean

    def _noise_std(self, plan: RoundPlan, members: Sequence[Member]) -> float:
        """Return the std of the noise in the mean update of ``members``."""
        if self._by_client:
            return plan.noise_multiplier * plan.clip_norm / plan.cohort
        weights = [self._weight(member) for member in members]
        noise = [plan.how.noise_std(plan, member.declared_size) for member in members]
        return math.hypot(*(w * s for w, s in zip(weights, noise, strict=True))) / sum(weights)

    def _take_reply(self, current: _OpenRound, member: Member, reply: Message) -> None:
        verdict = admit(reply, current.plan, member.declared_size)
        total = message_bytes(reply)
        if isinstance(verdict, AdmittedUpdate):
            parts = verdict.parts + PartBytes(framing=total - verdict.parts.total)
        else:
            parts = PartBytes(framing=total)
        counts = isinstance(verdict, AdmittedUpdate) and member.site not in current.admitted
        self._state.traffic.received(member.site, parts, update=counts)
        if member.site in current.admitted:
            current.rejections[member.site] = Rejection("a second reply to the same round")
        elif isinstance(verdict, Rejection):
            current.rejections[member.site] = verdict
        else:
            current.admitted[member.site] = verdict

    def _charge(self, current: _OpenRound) -> None:
        """Charge every site that was asked, unless it said that it refused.

        Where the unit is the client every site is charged for every round: that it may have been drawn is what drawing
        a cohort in secret protects.
        """
        charge = current.plan.charge
        if self._by_client:
            charge = None
            for member in self._members:
                each_round = Charge(current.plan.noise_multiplier, self._config.cohort_rate, 1)
                self._state.privacy.charge(member.site, each_round)
        for member in current.cohort:
            if member.site not in current.admitted and member.site not in current.rejections:
                current.rejections[member.site] = Rejection(f"no reply within {self._config.round_deadline:g} s")
            rejection = current.rejections.get(member.site)
            refused = rejection is not None and not rejection.spent and member.site not in current.admitted
            if charge is not None and not refused:
                self._state.privacy.charge(member.site, charge)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nothing: a site tells nothing but its update, so the server evaluates on its own test set."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Have nothing to aggregate."""
        return None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds that are still to do, up to ``num_rounds``; checkpoint and log after each.

        Flower's own loop always begins at round 1; this one goes on where a checkpoint left off.
        """
        arrays = initial_arrays
        for round_number in range(self._state.rounds_done + 1, num_rounds + 1):
            messages = self.configure_train(round_number, arrays, train_config or ConfigRecord(), grid)
            deadline = time.monotonic() + timeout
            replies = grid.send_and_receive(messages, timeout=timeout)
            aggregated, _ = self.aggregate_train(round_number, self._answers_in_full(grid, replies, deadline))
            arrays = aggregated if aggregated is not None else arrays
            self._close_round(round_number, _vector(arrays))
        return Result(arrays=arrays)

    def _close_round(self, round_number: int, model: Values) -> None:
        current, state, config = self._open, self._state, self._config
        assert current is not None
        due = config.evaluate_every and (round_number % config.evaluate_every == 0 or round_number == config.rounds)
        score = self._evaluate(self.result()) if due else None
        seconds = time.monotonic() - current.started
        state.rounds_done = round_number
        state.seconds += seconds
        mask, traffic = current.plan.mask, state.traffic
        self._log.write(
            "round",
            round=round_number,
            epoch=mask.epoch,
            density=mask.kept / mask.size,
            kept=mask.kept,
            cohort=[member.site for member in current.cohort],
            admitted=len(current.admitted),
            rejections=[{"site": s, "reason": r.reason} for s, r in sorted(current.rejections.items())],
            abandoned=current.abandoned,
            accuracy=score.accuracy if score else None,
            loss=score.loss if score else None,
            epsilon=state.privacy.largest_epsilon() if config.is_private else None,
            uplink=asdict(traffic.round_uplink.parts),
            downlink=asdict(traffic.round_downlink.parts),
            dense_uplink=traffic.round_uplink.dense,
            dense_downlink=traffic.round_downlink.dense,
            bits_per_parameter=_bits(traffic.round_uplink.parts.total, mask.size * len(current.cohort)),
            bits_per_value=_bits(
                sum(admitted.parts.values for admitted in current.admitted.values()),
                sum(admitted.values.size for admitted in current.admitted.values()),
            ),
            sites=[
                [site, *astuple(parts.uplink), *astuple(parts.downlink)]
                for site, parts in sorted(traffic.round_sites.items())
            ],
            seconds=round(seconds, 3),
        )
        self._save(model)

    def result(self) -> Values:
        """Return what the run has come to: the broadcast model, or the average over rounds where one is kept."""
        return self._state.average.of(self._downlink.model)

    def _remaining(self) -> list[Member]:
        """Return the members that have not refused the rest of the run; too few of them end it."""
        remaining = [member for member in self._members if not self._counts(member.site).dropped]
        if len(remaining) < self._config.min_cohort:
            reasons = sorted({counts.dropped for counts in self._state.counts.values() if counts.dropped})
            raise FederationError(
                f"{len(remaining)} of {len(self._members)} sites still take part, fewer than min-cohort="
                f"{self._config.min_cohort}; the others {'; '.join(reasons[:3])}"
            )
        return remaining

    def _weight(self, member: Member) -> float:
        return float(member.declared_size) if self._config.weighting == "size" else 1.0

    def _counts(self, site: int) -> SiteCounts:
        return self._state.counts.setdefault(site, SiteCounts())

    def site_table(self) -> list[dict[str, Any]]:
        """Return one row per site for the end of the log."""
        state = self._state
        epsilons = state.privacy.epsilons()
        rows = []
        for member in self._members:
            traffic, counts = state.traffic.sites.get(member.site), self._counts(member.site)
            rows.append(
                {
                    "site": member.site,
                    "epsilon": epsilons.get(member.site, 0.0) if self._config.is_private else None,
                    "uplink": traffic.uplink.total if traffic else 0,
                    "downlink": traffic.downlink.total if traffic else 0,
                    "admitted": counts.admitted,
                    "rejected": counts.rejected,
                    "dropped": counts.dropped or None,
                }
            )
        return rows


def _returned(grid: Grid, away: Sequence[Member], deadline: float) -> list[Member]:
    """Return those of ``away`` whose nodes are back before ``deadline``."""
    while True:
        there = set(grid.get_node_ids())
        back = [member for member in away if member.node_id in there]
        if len(back) == len(away) or time.monotonic() >= deadline:
            return back
        time.sleep(0.5)


def _bits(count: int, of: int) -> float | None:
    return round(8 * count / of, 4) if of else None


def _record(model: Values) -> ArrayRecord:
    return ArrayRecord({_MODEL_ARRAY: Array(model)})


def _vector(arrays: ArrayRecord) -> Values:
    vector: Values = arrays[_MODEL_ARRAY].numpy()
    return vector
