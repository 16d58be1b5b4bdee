"""The Flower Strategy: glue between Flower's rounds and the parts of the server."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from logging import INFO

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from common.charges import Charge
from common.coding import Values
from common.config import RunConfig
from common.errors import FederationError
from common.mask import Indices
from common.plan import RoundPlan
from common.randomness import RoundRandomness
from common.signing import PlanSigner
from server.aggregate import noisy_mean
from server.downlink import Downlink
from server.evaluation import Score
from server.federation import Member, draw_cohort, draw_secret_cohort
from server.messages import RoundMessages
from server.methods.policy import MethodPolicy
from server.open_round import OpenRound
from server.planning import round_plan
from server.runlog import RunLog
from server.state import ServerState

_MODEL_ARRAY = "model"


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
        self._state = state
        self._log = log
        self._evaluate = evaluate
        self._save = save
        self._randomness_of = randomness
        self._by_client = config.is_private and config.privacy_unit == "client"
        self._open: OpenRound | None = None
        self._model: Values  # that the open round starts from
        self._randomness: RoundRandomness  # the server's own of the open round
        self._messages = RoundMessages(
            downlink=downlink, signer=signer, traffic=state.traffic, round_deadline=config.round_deadline
        )

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
        self._open = OpenRound(plan, cohort, time.monotonic(), frozenset(grid.get_node_ids()))
        self._state.traffic.begin_round()
        return self._messages.address(self._open, cohort, self._config.round_deadline)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Admit or reject every reply, then move the model along the mean of the admitted updates."""
        current = self._open
        assert current is not None, "aggregate_train follows configure_train"
        by_node = current.by_node
        for reply in replies:
            member = by_node.get(reply.metadata.src_node_id)
            if member is not None:  # Flower delivers replies of asked nodes only; anything else is not ours to count
                current.take_reply(member, reply, self._state.traffic)
        self._charge(current)
        current.count_in(self._state)
        for site in current.admitted:
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

    def _mean(self, current: OpenRound, members: Sequence[Member]) -> tuple[Indices, Values]:
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

    def _charge(self, current: OpenRound) -> None:
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
        current.reject_silent(self._config.round_deadline)
        for member in current.cohort:
            if charge is not None and not current.has_refused(member.site):
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
            assert self._open is not None
            deadline = time.monotonic() + timeout
            replies = grid.send_and_receive(messages, timeout=timeout)
            answers = self._messages.answers_in_full(self._open, grid, replies, deadline)
            aggregated, _ = self.aggregate_train(round_number, answers)
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
        self._log.write(
            "round",
            **current.outcome(),
            accuracy=score.accuracy if score else None,
            loss=score.loss if score else None,
            epsilon=state.privacy.largest_epsilon() if config.is_private else None,
            **current.bytes_spent(state.traffic),
            seconds=round(seconds, 3),
        )
        self._save(model)

    def result(self) -> Values:
        """Return what the run has come to: the broadcast model, or the average over rounds where one is kept."""
        return self._state.average.of(self._downlink.model)

    def _remaining(self) -> list[Member]:
        """Return the members that have not refused the rest of the run; too few of them end it."""
        remaining = [member for member in self._members if not self._state.counts_of(member.site).dropped]
        if len(remaining) < self._config.min_cohort:
            reasons = sorted({counts.dropped for counts in self._state.counts.values() if counts.dropped})
            raise FederationError(
                f"{len(remaining)} of {len(self._members)} sites still take part, fewer than min-cohort="
                f"{self._config.min_cohort}; the others {'; '.join(reasons[:3])}"
            )
        return remaining

    def _weight(self, member: Member) -> float:
        return float(member.declared_size) if self._config.weighting == "size" else 1.0


def _record(model: Values) -> ArrayRecord:
    return ArrayRecord({_MODEL_ARRAY: Array(model)})


def _vector(arrays: ArrayRecord) -> Values:
    vector: Values = arrays[_MODEL_ARRAY].numpy()
    return vector
