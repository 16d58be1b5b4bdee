"""Flower ServerApp: wires config, federation, strategy and the run's folder together."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.common.logger import log as flower_log
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from common import datasets, models
from common.charges import PrivacyUnit, neighbours_of
from common.coding import PartBytes, Values
from common.config import RunConfig
from common.errors import ModelError, NothingLearned
from common.integers import grid_entropy_bits
from common.randomness import RoundRandomness, SecureRandomness
from common.signing import PlanSigner
from server.aggregate import ModelAverage, ServerOptimizer
from server.checkpoint import Checkpoint
from server.downlink import Downlink
from server.evaluation import Evaluator, Score
from server.federation import Member, join
from server.grid import PromptGrid
from server.methods import open_policy
from server.methods.policy import MethodPolicy
from server.planning import run_noise_multiplier, sample_plan
from server.privacy import PrivacyAccount
from server.runfolder import RunFolder
from server.runlog import Event, Listener, RunLog, read_events
from server.state import ServerState, SiteCounts
from server.strategy import SparseDpStrategy
from server.traffic import Traffic

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config says."""
    config = RunConfig.parse(_plain(context.run_config))
    run(PromptGrid(grid), config, (lambda event: _tell_flower(event, config.privacy_unit),))


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run leaves."""

    folder: Path
    model: Values
    accuracy: float | None
    loss: float | None
    epsilon: float | None
    uplink_bytes: int
    uplink_saving: float
    total_saving: float
    seconds: float


def run(
    grid: Grid,
    config: RunConfig,
    listeners: tuple[Listener, ...] = (),
    seeded: Callable[[int], RoundRandomness] | None = None,
) -> RunResult:
    """Run, or resume, a federation over ``grid`` and return its result.

    ``seeded`` returns the server's own randomness for a round, for cohorts and noise where the unit is the client: for
    simulations alone. Without it they are drawn in secret.
    """
    evaluate = _evaluation(config)
    initial = models.initial_vector(config.model, config.seed)
    policy = open_policy(config, initial.size)
    noise_multiplier = run_noise_multiplier(config, policy)
    signer = PlanSigner.load(Path(config.server_key)) if config.server_key else None
    # Everything that can be wrong with a config has been tried by now: only then is a folder made and a site asked.
    members = join(grid, config.sites, config.round_deadline)
    resume = config.resume or (config.restart and RunFolder.has_begun(config))
    folder = RunFolder.resume(config) if resume else RunFolder.create(config)
    log = RunLog(folder.log, listeners)
    try:
        state = ServerState(
            ServerOptimizer(config.server_optimizer, config.server_learning_rate, config.server_momentum, initial.size),
            ModelAverage(config.server_averaging, initial.size),
            PrivacyAccount(config.delta, config.accountant),
            Traffic(initial.size),
        )
        if resume:
            initial = _restore(state, policy, Checkpoint.load(folder.checkpoint), initial, log)
            _ask_again_if_needed(state, config, members)
            so_far = state.traffic.uplink
            log.write(
                "resume",
                round=state.rounds_done + 1,
                time=time.time(),
                uplink=so_far.parts.total,
                downlink=state.traffic.downlink.parts.total,
                dense_uplink=so_far.dense,
            )
        else:
            by_client = config.privacy_unit == "client"
            seeded_noise = seeded is not None if by_client else any(member.simulated for member in members)
            _log_start(log, folder, config, policy, noise_multiplier, members, initial, evaluate, seeded_noise)

        def save(model: Values) -> None:
            _checkpoint(state, policy, model, log).save(folder.checkpoint)

        downlink = Downlink(
            config.downlink_coding_used, _model_step(config, policy, noise_multiplier, members, state.optimizer)
        )
        downlink.publish(initial, state.model_version, None)
        if not resume:
            policy.begin(downlink.model)
        downlink.use_reference(policy.reference)
        save(initial)
        strategy = SparseDpStrategy(
            run_name=folder.name,
            config=config,
            noise_multiplier=noise_multiplier,
            members=members,
            policy=policy,
            downlink=downlink,
            signer=signer,
            state=state,
            log=log,
            evaluate=evaluate,
            save=save,
            randomness=seeded or (lambda round_number: SecureRandomness.fresh()),
        )
        strategy.start(grid, ArrayRecord({"model": Array(initial)}), config.rounds, config.round_deadline)
        _require_learning(state, folder)
        return _finish(log, folder, config, policy, state, members, strategy.result(), evaluate)
    finally:
        log.close()


def _tell_flower(event: Event, unit: PrivacyUnit) -> None:
    """Put the run's progress into Flower's own log, where ``flwr run --stream`` and ``flwr log`` show it."""
    if event["event"] == "round":
        spent = event["epsilon"]
        privacy = "NOT PRIVATE" if spent is None else f"epsilon {spent:.3f} per {unit} ({neighbours_of(unit)})"
        loss = "-" if event["loss"] is None else f"none, loss {event['loss']:.4g}"
        accuracy = loss if event["accuracy"] is None else f"{event['accuracy']:.2%}"
        uplink = PartBytes(**event["uplink"]).total
        flower_log(INFO, "round %d: accuracy %s, %s, uplink %d bytes", event["round"], accuracy, privacy, uplink)
        for rejection in event["rejections"]:
            flower_log(
                WARNING, "round %d: site %d rejected: %s", event["round"], rejection["site"], rejection["reason"]
            )
    elif event["event"] == "end":
        flower_log(INFO, "uplink %.2f times smaller than dense float32", event["uplink_saving"])


def _plain(mapping: Mapping[str, object]) -> dict[str, bool | int | float | str]:
    return {key: value for key, value in mapping.items() if isinstance(value, bool | int | float | str)}


def _evaluation(config: RunConfig) -> Callable[[Values], Score | None]:
    if not config.evaluate_every:
        return lambda model: None
    return Evaluator(config.model, datasets.load(config.dataset)).score


def _model_step(
    config: RunConfig,
    policy: MethodPolicy,
    noise_multiplier: float,
    members: list[Member],
    optimizer: ServerOptimizer,
) -> float:
    """Return the step of the grid on which the model travels: downlink-grid times the noise that a round adds to it.

    The noise of a mean over a cohort of c with weights w and noise s_i is that of a typical cohort:
    sqrt(mean of (w_i s_i)^2 / c) / mean of w_i.
    """
    if config.privacy_unit == "client":
        noise_std = noise_multiplier * config.clip_norm / config.cohort_size
        return config.downlink_grid * optimizer.noise_gain(noise_std)
    sizes = np.array([member.declared_size for member in members], np.float64)
    plan = sample_plan(config, policy, noise_multiplier, 1)
    noise = np.array([plan.how.model_noise_std(config, plan, member.declared_size) for member in members])
    weights = sizes if config.weighting == "size" else np.ones_like(sizes)
    mean_noise = math.sqrt(float(np.square(weights * noise).mean()) / config.cohort_size) / float(weights.mean())
    return config.downlink_grid * optimizer.noise_gain(mean_noise)


def _restore(state: ServerState, policy: MethodPolicy, checkpoint: Checkpoint, initial: Values, log: RunLog) -> Values:
    if checkpoint.model.shape != initial.shape or checkpoint.optimizer.keys() != _arrays(state, policy).keys():
        raise ModelError("the checkpoint is of another model, method or server optimizer than the run config's")
    log.rewind(checkpoint.log_position)
    state.run_id = checkpoint.run_id
    state.rounds_done, state.model_version = checkpoint.rounds_done, checkpoint.model_version
    state.seconds = checkpoint.seconds
    for holder in (state.optimizer, state.average, policy):
        holder.state.update({name: checkpoint.optimizer[name] for name in holder.state})
    state.privacy.restore(checkpoint.privacy)
    state.traffic = Traffic.from_json(initial.size, checkpoint.traffic)
    state.counts = {int(site): SiteCounts(*counts) for site, counts in checkpoint.counts.items()}
    return checkpoint.model


def _ask_again_if_needed(state: ServerState, config: RunConfig, members: list[Member]) -> None:
    """Ask sites again that had refused the rest of the run, where it could not go on without them.

    To resume such a run is an occasion to raise a budget; any other run goes on as if it had not been stopped.
    """
    remaining = [member for member in members if not state.counts.get(member.site, SiteCounts()).dropped]
    if len(remaining) < config.min_cohort:
        state.counts = {site: replace(counts, dropped="") for site, counts in state.counts.items()}


def _arrays(state: ServerState, policy: MethodPolicy) -> dict[str, NDArray[Any]]:
    return {**state.optimizer.state, **state.average.state, **policy.state}


def _checkpoint(state: ServerState, policy: MethodPolicy, model: Values, log: RunLog) -> Checkpoint:
    return Checkpoint(
        model=model,
        run_id=state.run_id,
        rounds_done=state.rounds_done,
        model_version=state.model_version,
        log_position=log.position(),
        seconds=state.seconds,
        optimizer=_arrays(state, policy),
        privacy=state.privacy.to_json(),
        traffic=state.traffic.to_json(),
        counts={str(site): [*astuple(counts)] for site, counts in state.counts.items()},
    )


def _log_start(
    log: RunLog,
    folder: RunFolder,
    config: RunConfig,
    policy: MethodPolicy,
    noise_multiplier: float,
    members: list[Member],
    initial: Values,
    evaluate: Callable[[Values], Score | None],
    seeded_noise: bool,
) -> None:
    score = evaluate(initial)
    by_client = config.privacy_unit == "client"  # whose sites' sizes are as private as all else about them
    log.write(
        "run",
        name=folder.name,
        version=_version(),
        time=time.time(),
        config=config.to_mapping(),
        parameters=initial.size,
        method=config.method,
        private=config.is_private,
        noise_multiplier=noise_multiplier,
        value_coding=config.value_coding_used,
        downlink_coding=config.downlink_coding_used,
        grid_entropy_bits=grid_entropy_bits(config.grid) if config.released_noise_is_coded else None,
        accountant=config.accountant,
        privacy_unit=config.privacy_unit,
        neighbours=neighbours_of(config.privacy_unit),
        sites=len(members),
        declared_sizes=[] if by_client else [[member.site, member.declared_size] for member in members],
        seeded_noise=seeded_noise,
        planned_epsilon=config.epsilon if config.is_private else None,
        published_epsilon=_published_epsilon(config, policy, noise_multiplier, members),
        initial_accuracy=score.accuracy if score else None,
        initial_loss=score.loss if score else None,
    )


def _published_epsilon(
    config: RunConfig, policy: MethodPolicy, noise_multiplier: float, members: list[Member]
) -> float | None:
    """Return what the method's paper would say of the run, for the smallest site; None where it says the same."""
    if not config.is_private:
        return None
    plan, smallest = sample_plan(config, policy, noise_multiplier, 1), min(m.declared_size for m in members)
    return config.how.published_epsilon(plan, config.rounds, smallest, config.delta)


def _require_learning(state: ServerState, folder: RunFolder) -> None:
    """Raise NothingLearned unless a round counted and a site had a part in it: sites may all be rejected.

    A round of unit client counts with however few sites; with none at all, what it adds to the model is noise.
    """
    if state.model_version and any(counts.admitted for counts in state.counts.values()):
        return
    rounds = (event for event in read_events(folder.log) if event["event"] == "round")
    reasons = (
        f"round {event['round']}, site {one['site']}: {one['reason']}"
        for event in rounds
        for one in event["rejections"]
    )
    raise NothingLearned(
        f"nothing was learnt: none of {state.rounds_done} rounds had enough admitted replies. "
        f"The first rejection: {next(reasons, 'none, as no site was asked')}. All are in {folder.log}"
    )


def _finish(
    log: RunLog,
    folder: RunFolder,
    config: RunConfig,
    policy: MethodPolicy,
    state: ServerState,
    members: list[Member],
    model: Values,
    evaluate: Callable[[Values], Score | None],
) -> RunResult:
    score = evaluate(model)
    epsilon = state.privacy.largest_epsilon() if config.is_private else None
    uplink, downlink = state.traffic.uplink, state.traffic.downlink
    kept = [policy.kept(round_number) for round_number in range(1, config.rounds + 1)]
    log.write(
        "end",
        rounds=state.rounds_done,
        accuracy=score.accuracy if score else None,
        loss=score.loss if score else None,
        epsilon=epsilon,
        uplink=asdict(uplink.parts),
        downlink=asdict(downlink.parts),
        dense_uplink=uplink.dense,
        dense_downlink=downlink.dense,
        uplink_saving=state.traffic.uplink_saving,
        total_saving=state.traffic.total_saving,
        total_density=float(np.mean(kept)) / model.size,
        seconds=round(state.seconds, 3),
        sites=state.site_table(members, private=config.is_private),
    )
    return RunResult(
        folder=folder.path,
        model=model,
        accuracy=score.accuracy if score else None,
        loss=score.loss if score else None,
        epsilon=epsilon,
        uplink_bytes=uplink.parts.total,
        uplink_saving=state.traffic.uplink_saving,
        total_saving=state.traffic.total_saving,
        seconds=state.seconds,
    )


def _version() -> str:
    try:
        return version("fedsieve")
    except PackageNotFoundError:  # the app runs from its bundle, without the distribution
        return "unknown"
