"""What a run promises and what it cost, for readers who know neither its code nor its vocabulary."""

import math
from collections.abc import Sequence

from simulations.report import words
from simulations.report.summary import RunSummary

Statement = list[tuple[str, str]]

_SECRET = "this page and the run's log tell which sites were drawn in which round, which the guarantee needs hidden"
_WEAK = 10.0  # an epsilon from which on the odds say little; the literature seldom defends more


def in_plain_words(run: RunSummary) -> Statement:
    """Answer what a stranger asks first: what ran, what was private, how much, for whom, and what it cost."""
    return [("What ran", _what_ran(run)), *_what_was_private(run), ("What it cost", _what_it_cost(run))]


def privacy_details(run: RunSummary) -> Statement:
    """Return the guarantee with all that is needed to check it."""
    noise = words.NONE if run.noise_multiplier is None else f"{run.noise_multiplier:.4g}"
    spent = f"{words.guarantee(run).removeprefix('at ')}, the largest over the sites, rounded up"
    unit = run.privacy_unit
    statement = [
        ("Guarantee", f"{spent}; planned epsilon {words.epsilon(run.planned_epsilon)}"),
        ("Who is protected", _protected(run)),
    ]
    if unit == "client":
        statement.append(("Keep secret", _SECRET))
    statement += [
        ("Unit", f"one {unit}; whoever is behind several of them is protected less"),
        ("Neighbours", run.neighbours),
        ("Method", words.method(run)),
        ("Accountant", f"{run.accountant}; noise multiplier {noise}"),
    ]
    if run.published_epsilon is not None:
        theirs = f"the paper's own would say epsilon {run.published_epsilon:.4g}; not a guarantee"
        statement.append(("Published accounting", theirs))
    if run.audit is not None:
        proved = f"proved an epsilon of at least {run.audit.lower_bound:.2f}"
        claim = f"of the {words.epsilon(run.audit.claimed_epsilon)} claimed (95 % confidence)"
        statement.append(("Audit", f"an attack with {run.audit.canaries:,} canaries {proved} {claim}"))
    return statement


def _what_ran(run: RunSummary) -> str:
    model, data = run.config.get("model", "unnamed"), run.config.get("dataset", "unnamed")
    rounds = "1 round" if len(run.rounds) == 1 else f"{len(run.rounds)} rounds"
    if not run.finished:
        rounds = f"{rounds} of {run.config.get('rounds', '?')} so far"
    asked = _average([one.asked for one in run.rounds])
    cohort = "" if asked is None or asked == run.sites else f", {asked:.3g} of the sites asked in each on average"
    return (
        f"{run.sites} sites trained one model together (model {model}, {run.parameters:,} parameters; data {data}). "
        f"Records stay at their sites: what travels is the model, and how far each site wants to move it. {rounds} in "
        f"{words.duration(run.seconds)}{cohort}."
    )


def _what_was_private(run: RunSummary) -> Statement:
    if not run.private:
        return [("What was private", f"nothing: {words.lacks(run)}. Uploads and model may reveal records.")]
    one = "training record" if run.privacy_unit == "record" else run.privacy_unit
    where = " of each site" if run.privacy_unit != "client" else ""
    what = f"each {one}{where}: whether it took part at all, and with that everything about it"
    seed = (
        "if these sites were simulated, their noise comes from the run's seed so that results can be repeated, and "
        "whoever knows the seed can take it away; a deployed site draws it in secret"
    )
    open_to_see = "that a site takes part; how many records it declares; facts about the data as a whole"
    return [
        ("What was private", f"{what}."),
        ("At which epsilon", f"{words.guarantee(run).removeprefix('at ')}, over all rounds. {_odds(run)}"),
        ("For whom", f"{_protected(run)}."),
        ("What was not", f"{open_to_see}; a test set of the server. And {seed}."),
    ]


def _odds(run: RunSummary) -> str:
    """Read epsilon as the factor by which evidence can change odds, rounded up like epsilon itself."""
    if run.epsilon is None or not math.isfinite(run.epsilon) or run.delta is None:
        return "How much that is cannot be said yet."
    epsilon = float(words.epsilon(run.epsilon))
    if epsilon > 20:
        factor = f"e^{epsilon:g}"
    else:
        factor = f"{math.ceil(math.exp(epsilon)):,}" if epsilon > 3 else f"{math.ceil(100 * math.exp(epsilon)) / 100:g}"
    weak = " That is a weak promise." if epsilon > _WEAK else ""
    return (
        f"Whoever has seen all of it can change the odds that one {run.privacy_unit} took part by a factor of at most "
        f"{factor}, but for a chance of {run.delta:g} (delta). Less is more private: epsilon 0 would be perfect.{weak}"
    )


def _protected(run: RunSummary) -> str:
    unit = run.privacy_unit
    if unit == "client":
        return (
            "each site as a whole, against everyone who sees the models; the server is trusted: it sees the uploads "
            "before it adds the noise"
        )
    return f"each {unit} of each site, against everyone who sees the uploads of that site, including the server"


def _what_it_cost(run: RunSummary) -> str:
    messages = sum(one.asked or 0 for one in run.rounds)
    if not run.uplink or not messages:
        return "nothing uploaded yet."
    directions = (("up", run.uplink, run.dense_uplink), ("down", run.downlink, run.dense_downlink))
    total = " and ".join(f"{words.in_bytes(cost)} {way}" for way, cost, _ in directions)
    each = " and ".join(f"{words.in_bytes(cost / messages)} {way}" for way, cost, _ in directions)
    versus = " and ".join(f"{words.against_dense(cost, dense)} {way}" for way, cost, dense in directions)
    return (
        f"{total} for all sites and rounds together; {each} for one site in one round. That is {versus}, where dense "
        "means every parameter as a 4-byte number in every message."
    )


def _average(numbers: Sequence[int]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
