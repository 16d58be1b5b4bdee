"""Figures and findings in words: how the report writes a share, an epsilon or a number of bytes, and its headlines."""

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal

from common.methods import METHODS, Method
from simulations.report.summary import NOT_PRIVATE, RunSummary

NONE = "\N{EN DASH}"  # where there is no figure


def percent(value: float | None) -> str:
    """Return a share with one decimal."""
    return NONE if value is None else f"{100 * value:.1f} %"


def percent_tick(value: float) -> str:
    """Return a share for an axis: no more digits than it needs."""
    return f"{100 * value:.4g} %"


def epsilon(value: float | None) -> str:
    """Round up: a printed epsilon is a promise, and the promise must hold."""
    if value is None:
        return NONE
    return str(Decimal(repr(value)).quantize(Decimal("0.01"), ROUND_CEILING)) if math.isfinite(value) else "infinite"


def in_bytes(value: float) -> str:
    """Return a number of bytes with three digits and a decimal unit (1 kB = 1000 B)."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def bits(value: float | None) -> str:
    """Return a number of bits with three digits."""
    return NONE if value is None else f"{value:.3g} bits"


def bits_note(run: RunSummary) -> str:
    """Say how a value was coded, and what a parameter cost in a round."""
    noise = "" if run.grid_entropy_bits is None else f", noise alone takes {bits(run.grid_entropy_bits)}"
    return f"{run.value_coding}{noise}; {bits(run.bits_per_parameter)} per parameter and round"


def schedule(run: RunSummary) -> str:
    """Say how the mask changes over the rounds; there must be one."""
    first, last = run.rounds[0], run.rounds[-1]
    masks = len({one.epoch for one in run.rounds})
    if masks == 1:
        return f"One mask keeps {last.kept:,} of {run.parameters:,} parameters."
    often = "every round" if masks == len(run.rounds) else f"every {len(run.rounds) / masks:.3g} rounds"
    if first.kept == last.kept:
        return f"A new mask {often}, each of {last.kept:,} of {run.parameters:,} parameters."
    return f"A new mask {often}: from {first.kept:,} of {run.parameters:,} parameters to {last.kept:,}."


def duration(seconds: float) -> str:
    """Return a time in the two largest units that it fills."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def against_dense(cost: int, dense: int) -> str:
    """Compare a number of bytes with that of dense messages."""
    if not cost or not dense:
        return "nothing sent yet"
    return saving(dense / cost)


def saving(ratio: float) -> str:
    """Say what a ratio of dense bytes to ours means."""
    if 0.995 < ratio < 1.005:
        return "as much as dense"
    return f"{ratio:.3g}x less than dense" if ratio > 1 else f"{1 / ratio:.3g}x more than dense"


def chance(probability: float) -> str:
    """Return a small probability as a share of a round number of cases, where there is one."""
    cases = round(1 / probability) if 0 < probability <= 0.5 else 0
    return f"1 in {cases:,}" if cases and abs(probability * cases - 1) < 1e-6 else f"{probability:g}"


def loss(value: float | None) -> str:
    """Return a loss with four digits."""
    return NONE if value is None else f"{value:.4g}"


def spent(run: RunSummary) -> str:
    """Return the epsilon spent; only a run without rounds has spent nothing, a missing figure is not a zero."""
    if run.epsilon is None:
        return "unknown" if run.rounds else epsilon(0.0)
    return epsilon(run.epsilon)


def method(run: RunSummary) -> str:
    """Return the run's method and what it does."""
    name = run.config.get("method", "random")
    return f"{name}: {METHODS[name].title}" if name in METHODS else name


def lacks(run: RunSummary) -> str:
    """Return what a run that is not private does without."""
    name = run.config.get("method", "random")
    return METHODS[name].lacks if name in METHODS else Method.lacks


def guarantee(run: RunSummary) -> str:
    """Return what the run promises, to follow its accuracy in a sentence."""
    if not run.private:
        return "without any privacy"
    delta = NONE if run.delta is None else f"{run.delta:g}"
    return f"at (epsilon {spent(run)}, delta {delta}) per {run.privacy_unit}"


def headline(run: RunSummary) -> str:
    """Sum a run up: accuracy, privacy, bytes."""
    accuracy = "No accuracy measured" if run.accuracy is None else f"{percent(run.accuracy)} test accuracy"
    if run.has_loss_alone:
        accuracy = f"Test loss {loss(run.loss)}"
    label = "" if run.private else "Not private: "
    so_far = "" if run.finished else f" so far ({run.progress})"
    traffic = f"uplink {in_bytes(run.uplink)}, {against_dense(run.uplink, run.dense_uplink)}"
    return f"{label}{accuracy} {guarantee(run)}{so_far}; {traffic if run.uplink else 'nothing uploaded yet'}"


def comparison_headline(runs: Sequence[RunSummary]) -> str:
    """Name the best runs, private and not, and the finished run with the least uplink."""
    parts = []
    for private in (True, False):
        alike = [run for run in runs if run.private is private]
        accuracies = [(run.accuracy, run) for run in alike if run.accuracy is not None]
        losses = [(run.loss, run) for run in alike if run.has_loss_alone and run.loss is not None]
        kind = "with" if private else "without"
        if accuracies:
            value, best = max(accuracies, key=lambda pair: pair[0])
            parts.append(f"highest accuracy {kind} privacy: {best.label}, {percent(value)}{_promise(best)}")
        if losses:
            value, best = min(losses, key=lambda pair: pair[0])
            parts.append(f"lowest test loss {kind} privacy: {best.label}, {loss(value)}{_promise(best)}")
    complete = [run for run in runs if run.finished and run.uplink]
    if complete:
        least = min(complete, key=lambda run: run.uplink)
        ratio = against_dense(least.uplink, least.dense_uplink)
        parts.append(f"least uplink: {least.label}, {in_bytes(least.uplink)}, {ratio}")
    text = "; ".join(parts) or "nothing measured yet"
    return text[0].upper() + text[1:]


def _promise(run: RunSummary) -> str:
    return f" {guarantee(run)}" if run.private else ""


def warning(runs: Sequence[RunSummary]) -> str:
    """Return the label that every output needs: empty when all runs are private."""
    public = sum(not run.private for run in runs)
    return "" if not public else NOT_PRIVATE if public == len(runs) else f"{public} of {len(runs)} {NOT_PRIVATE}"
