"""Plans of a run's rounds, and the noise with which all of them together meet the budget."""

from common.accounting import calibrate, epsilon_of
from common.charges import Charge, History, merged
from common.config import RunConfig
from common.errors import ConfigError
from common.mask import MaskSpec
from common.plan import RoundPlan
from server.methods.policy import MethodPolicy


def round_plan(
    config: RunConfig,
    *,
    run: str,
    round_number: int,
    mask: MaskSpec,
    noise_multiplier: float,
    model_version: int,
    model_digest: str,
    model_step: float,
    reference_digest: str = "",
) -> RoundPlan:
    """Return what a round asks of every site of its cohort; ``noise_multiplier`` is the run's."""
    fields = {
        "steps": config.steps_per_round,
        "noise_multiplier": noise_multiplier,
        **config.how.plan_fields(config, noise_multiplier, round_number),
    }
    return RoundPlan(
        run=run,
        round=round_number,
        model_version=model_version,
        model=config.model,
        mask_seed=mask.seed,
        mask_epoch=mask.epoch,
        mask_size=mask.size,
        mask_kept=mask.kept,
        mask_chosen=mask.chosen,
        mask_draws=mask.draws,
        mask_drawn_kept=mask.drawn_kept,
        private=config.is_private,
        privacy_unit=config.privacy_unit,
        cohort=float(config.cohort_size),
        sampling_rate=config.sampling_rate,
        clip_norm=config.clip_norm,
        learning_rate=config.learning_rate,
        momentum=config.client_momentum,
        physical_batch_size=config.physical_batch_size,
        value_coding=config.value_coding_used,
        index_coding=config.index_coding_used,
        grid=config.grid,
        model_digest=model_digest,
        model_step=model_step,
        method=config.method,
        reference_digest=reference_digest,
        **fields,
    )


def sample_plan(config: RunConfig, policy: MethodPolicy, noise_multiplier: float, round_number: int) -> RoundPlan:
    """Return a round's plan as far as its privacy goes: of a random mask of the right size, from no model."""
    mask = MaskSpec(config.seed, 0, policy.size, policy.kept(round_number))
    return round_plan(
        config,
        run="sample",
        round_number=round_number,
        mask=mask,
        noise_multiplier=noise_multiplier,
        model_version=0,
        model_digest="0" * 16,
        model_step=0.0,
        reference_digest="0" * 16 if config.how.has_reference else "",
    )


def planned_history(config: RunConfig, policy: MethodPolicy, noise_multiplier: float) -> History:
    """Return what all rounds together cost a record, or a client, of a site that is asked in every one of them."""
    if config.privacy_unit == "client":
        return (Charge(noise_multiplier, config.cohort_rate, config.rounds),)
    return merged(
        config.how.charge(sample_plan(config, policy, noise_multiplier, number))
        for number in range(1, config.rounds + 1)
    )


def run_noise_multiplier(config: RunConfig, policy: MethodPolicy) -> float:
    """Return the noise of the whole run: as given, or just enough for the budget if every round asks every site.

    Where the method is not private by design, it is that of the private run that it is compared with.
    """
    if not config.private or not config.how.adds_noise:
        return 0.0

    def history(noise_multiplier: float) -> History:
        return planned_history(config, policy, noise_multiplier)

    if not config.noise_multiplier:
        return calibrate(history, epsilon=config.epsilon, delta=config.delta, accountant=config.accountant)
    charges = history(config.noise_multiplier)
    cost = epsilon_of(charges, config.delta, config.accountant)
    if cost > config.epsilon:
        steps = sum(charge.steps for charge in charges)
        raise ConfigError(
            f"noise-multiplier={config.noise_multiplier:g} over {steps} steps costs epsilon {cost:.4g}, above "
            f"epsilon={config.epsilon:g}: raise 'noise-multiplier' or 'epsilon', or set noise-multiplier=0 to calibrate"
        )
    return config.noise_multiplier
