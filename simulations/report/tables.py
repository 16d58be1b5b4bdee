"""The tables of a report: runs, sites, rounds, rejections, bytes by part and configuration."""

from collections.abc import Iterable, Sequence

from common.coding import PartBytes
from simulations.report import words
from simulations.report.charts import PARTS
from simulations.report.page import table
from simulations.report.summary import NOT_PRIVATE, RoundSummary, RunSummary

_MOST_SITES = 200
_MOST_ROUNDS = 500
_MOST_REJECTIONS = 200
_LONGEST_REASON = 300
_MEANING = {
    "values": "the released numbers, or the model's",
    "index": "which coordinates they belong to",
    "header": "our lengths, versions and checksums; downwards also the plan of the round",
    "framing": "Flower's message around it",
}


def run_table(runs: Sequence[RunSummary]) -> str:
    """One row per run, in the colours of the charts; a loss where targets are numbers, which have no accuracy."""
    rows = [
        [
            run.label,
            run.progress,
            *_quality(run.accuracy, run.loss, runs),
            f"{words.spent(run)} of {words.epsilon(run.planned_epsilon)}" if run.private else NOT_PRIVATE,
            words.in_bytes(run.uplink),
            f"{run.dense_uplink / run.uplink:.3g}x" if run.uplink else words.NONE,
            words.bits(run.bits_per_value),
            words.in_bytes(run.downlink),
            words.percent(run.total_density),
            f"{run.sites}",
            words.duration(run.seconds),
        ]
        for run in runs
    ]
    traffic = ["uplink", "saving", "bits per value", "downlink", "density"]
    head = ["run", "progress", *_quality_head(runs), "epsilon", *traffic, "sites", "time"]
    return table(head, rows, word_columns=2, colours=range(1, len(runs) + 1))


def _quality_head(runs: Sequence[RunSummary]) -> list[str]:
    """Return the columns that say how good models are: whichever of accuracy and loss speaks for some of the runs."""
    loss = any(run.has_loss_alone for run in runs)
    return [*(["accuracy"] if not all(run.has_loss_alone for run in runs) else []), *(["loss"] if loss else [])]


def _quality(accuracy: float | None, loss: float | None, runs: Sequence[RunSummary]) -> list[str]:
    """Return the cells of these columns."""
    cells = {"accuracy": words.percent(accuracy), "loss": words.loss(loss)}
    return [cells[name] for name in _quality_head(runs)]


def part_table(runs: Sequence[RunSummary]) -> str:
    """Where the bytes went, by part and in both directions; all sites and rounds together."""
    totals = [
        (
            run,
            sum((one.uplink for one in run.rounds), PartBytes()),
            sum((one.downlink for one in run.rounds), PartBytes()),
        )
        for run in runs
    ]
    if len(runs) > 1:
        rows = [
            [run.label, way, *(words.in_bytes(getattr(parts, name)) for name in PARTS), words.in_bytes(parts.total)]
            for run, up, down in totals
            for way, parts in (("uplink", up), ("downlink", down))
        ]
        return table(["run", "direction", *PARTS, "total"], rows, word_columns=2)
    run, up, down = totals[0]
    rows = [
        [name, _MEANING[name], *_amount(getattr(up, name), up.total), *_amount(getattr(down, name), down.total)]
        for name in PARTS
    ]
    rows.append(["total", "what was sent", *_amount(up.total, up.total), *_amount(down.total, down.total)])
    dense = [*_amount(run.dense_uplink, up.total), *_amount(run.dense_downlink, down.total)]
    rows.append(["dense", "the same messages with 4 bytes per parameter", *dense])
    return table(["part", "what it is", "uplink", "share", "downlink", "share"], rows, word_columns=2)


def _amount(count: int, total: int) -> tuple[str, str]:
    return words.in_bytes(count), f"{100 * count / total:,.1f} %" if total else words.NONE


def difference_table(runs: Sequence[RunSummary]) -> str:
    """Only what differs in the configurations."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "name")  # the name is in the head
    rows = [[key, *(run.config.get(key, words.NONE) for run in runs)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "<p>Nothing: all runs have the same configuration.</p>"
    return table(["key", *(run.label for run in runs)], differing, word_columns=len(runs) + 1)


def site_table(run: RunSummary) -> str:
    """What the run has cost every site; before its end, as far as its rounds tell."""
    if not run.site_summaries:
        return "<p>No round has ended yet.</p>"
    # Before the end the log knows the largest epsilon only.
    bound = "" if run.finished else f"at most {words.spent(run)}"
    rows = [
        [
            one.site,
            f"{run.declared_sizes[one.site]:,}" if one.site in run.declared_sizes else words.NONE,
            bound or words.epsilon(one.epsilon) if run.private else words.NONE,
            words.in_bytes(one.uplink),
            words.in_bytes(one.downlink),
            f"{one.admitted}",
            f"{one.rejected}",
        ]
        for one in run.site_summaries[:_MOST_SITES]
    ]
    epsilon = "epsilon" if run.private else f"epsilon ({NOT_PRIVATE})"
    head = ["site", "records", epsilon, "uplink", "downlink", "admitted", "rejected"]
    dropped = [[one.site, one.dropped] for one in run.site_summaries if one.dropped]
    away = f"<p>Asked no more:</p>{table(['site', 'why'], dropped, word_columns=2)}" if dropped else ""
    return table(head, rows, word_columns=1) + _more(len(run.site_summaries), _MOST_SITES, "sites") + away


def round_table(run: RunSummary) -> str:
    """Every round in figures: what the charts show, for readers who do not see them."""
    if not run.rounds:
        return "<p>No round has ended yet.</p>"
    rows = [
        [
            f"{one.number}",
            *_quality(one.accuracy, one.loss, [run]),
            words.epsilon(one.epsilon),
            words.percent(one.density),
            f"{one.kept:,}",
            f"{one.epoch + 1}",
            f"{one.admitted} of {one.asked}",
            words.in_bytes(one.uplink.total),
            words.in_bytes(one.downlink.total),
            words.duration(one.seconds),
        ]
        for one in run.rounds[-_MOST_ROUNDS:]
    ]
    traffic = ["uplink", "downlink", "time"]
    head = ["round", *_quality_head([run]), "epsilon", "density", "kept", "mask", "admitted", *traffic]
    return table(head, rows, word_columns=1) + _more(len(run.rounds), _MOST_ROUNDS, "rounds before these")


def rejection_table(run: RunSummary) -> str:
    """Every reply that was not used, and every round that was abandoned, with the reason."""
    rows = [row for one in run.rounds for row in _rejection_rows(one)]
    if not rows:
        return "<p>No reply was rejected and no round was abandoned.</p>"
    shown = table(["round", "site", "reason"], rows[:_MOST_REJECTIONS], word_columns=3)
    return shown + _more(len(rows), _MOST_REJECTIONS, "rows")


def _rejection_rows(one: RoundSummary) -> Iterable[list[str]]:
    if one.abandoned:
        yield [f"{one.number}", "all", "round abandoned: too few replies, model unchanged"]
    for rejection in one.rejections:
        cut = rejection.reason[:_LONGEST_REASON]
        yield [f"{one.number}", rejection.site, cut if cut == rejection.reason else f"{cut} ..."]


def config_table(run: RunSummary) -> str:
    """Every key of the run config."""
    return table(["key", "value"], [[key, value] for key, value in run.config.items()], word_columns=2)


def _more(count: int, shown: int, what: str) -> str:
    return f"<p>And {count - shown} more {what}.</p>" if count > shown else ""
