"""What a run promises and what it cost, for readers who know neither its code nor its vocabulary."""

import math
from collections.abc import Sequence

from common.methods import METHODS
from simulations.report import words
from simulations.report.summary import RunSummary

Statement = list[tuple[str, str]]

_SECRET = (
    "this page tells how often each site was drawn, and the run's log in which rounds; the guarantee needs both "
    "hidden, so keep them with the server"
)
_ACCOUNTANTS = {
    "rdp": "rdp (Rényi differential privacy)",
    "prv": "prv (privacy random variables)",
    "pld": "pld (privacy loss distributions)",
}
# What an epsilon is worth, up to each of these; docs/how-to.md says the same. The literature seldom defends the last.
_JUDGEMENTS = ((1.0, "a strong promise"), (3.0, "a fair promise"), (10.0, "a weak promise"))
_NO_PROMISE = "so weak a promise that we would not call it private"


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
    if run.seeded_noise is not None:
        statement.append(("Noise", "from the seed: a simulation" if run.seeded_noise else "drawn in secret"))
    statement += [
        ("Unit", f"one {unit}; whoever is behind several of them is protected less"),
        ("Neighbours", run.neighbours),
        ("Method", words.method(run)),
        ("What was accounted", _accounted(run, noise)),
        ("Accountant", _ACCOUNTANTS.get(run.accountant, run.accountant)),
    ]
    if run.published_epsilon is not None:
        theirs = f"the paper's own would say epsilon {run.published_epsilon:.4g}; not a guarantee"
        statement.append(("Published accounting", theirs))
    if run.audit is not None:
        proved = f"proved an epsilon of at least {run.audit.lower_bound:.2f}"
        claim = f"of the {words.epsilon(run.audit.claimed_epsilon)} claimed (95 % confidence)"
        statement.append(("Audit", f"an attack with {run.audit.canaries:,} canaries {proved} {claim}"))
    return statement


def _accounted(run: RunSummary, noise: str) -> str:
    """Say what is added up; each method's own charge has its name in the registry."""
    asked = {key: run.config.get(key, words.NONE) for key in ("sampling-rate", "steps-per-round", "clip-norm")}
    limits = f"clip norm {asked['clip-norm']}, noise multiplier {noise}"
    if run.privacy_unit == "client":
        cohort = run.config.get("cohort", "0")
        drawn = (
            "in each of which all sites are asked"
            if cohort == "0"
            else f"each with about {cohort} sites drawn in secret"
        )
        return f"{len(run.rounds)} rounds, {drawn} of {run.sites}; the sum of their movements: {limits}"
    name = run.config.get("method", "random")
    accounting = METHODS[name].accounting if name in METHODS else name
    return (
        f"{accounting}; {asked['steps-per-round']} steps for each round that a site was asked in, each on a sample "
        f"that a record is in with a chance of {asked['sampling-rate']}; {limits}"
    )


def _what_ran(run: RunSummary) -> str:
    model, data = run.config.get("model", "unnamed"), run.config.get("dataset", "unnamed")
    rounds = "1 round" if len(run.rounds) == 1 else f"{len(run.rounds)} rounds"
    if not run.finished:
        rounds = f"{rounds} of {run.config.get('rounds', '?')} so far"
    asked = _average([one.asked for one in run.rounds])
    cohort = "" if asked is None or asked == run.sites else f", {asked:.3g} of the sites asked in each on average"
    simulated = "A simulation: " if run.seeded_noise else ""
    return (
        f"{simulated}{run.sites} sites{_records(run)} trained one model together (model {model}, {run.parameters:,} "
        f"parameters; data {data}). "
        f"Records stay at their sites: what travels is the model, and how far each site wants to move it. {rounds} in "
        f"{words.duration(run.seconds)}{cohort}."
    )


def _records(run: RunSummary) -> str:
    sizes = run.declared_sizes.values()
    if not sizes:
        return ""
    each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    records = "record" if each == "1" else "records"
    return f" that declare {each} {records} each ({sum(sizes):,} in all)"


def _what_was_private(run: RunSummary) -> Statement:
    if not run.private:
        return [("What was private", f"nothing: {words.lacks(run)}. Uploads and model may reveal records.")]
    by_client = run.privacy_unit == "client"
    one = "whole site" if by_client else f"training {run.privacy_unit} of each site"
    noise = (
        "if these sites were simulated, their noise comes from the run's seed so that results can be repeated, and "
        "whoever knows the seed can take it away; a deployed site draws it in secret"
    )
    if run.seeded_noise is not None:
        who = "the server draws" if by_client else "sites draw"
        noise = (
            f"this was a simulation: its noise comes from the seed that stands in the configuration below, so that "
            f"results can be repeated, and whoever knows it can take the noise away; deployed, {who} it in secret"
            if run.seeded_noise
            else "the noise was drawn in secret and is kept nowhere"
        )
    open_to_see = (
        "what a site uploads, from the server, which sees it without noise; facts about all sites as a whole"
        if by_client
        else "that a site takes part; how many records it declares; facts about the data as a whole"
    )
    statement = [
        ("What was private", f"each {one}: whether it took part at all, and with that everything about it."),
        ("At which epsilon", f"{_guarantee(run)}, over all rounds. {_odds(run)}"),
        ("For whom", f"{_protected(run)}. {_unit(run)}"),
        ("What was not", f"{open_to_see}; a test set of the server. And {noise}."),
    ]
    return [*statement, ("Keep secret", f"{_SECRET}.")] if by_client else statement


def _guarantee(run: RunSummary) -> str:
    delta = words.NONE if run.delta is None else words.chance(run.delta)
    return f"(epsilon {words.spent(run)}, delta {delta}) per {run.privacy_unit}"


def _unit(run: RunSummary) -> str:
    if run.privacy_unit != "record":
        return ""
    return "A record is one row of training data, such as one picture; whoever is behind several is protected less."


def _odds(run: RunSummary) -> str:
    """Read epsilon as the factor by which evidence can improve odds, rounded up like epsilon itself."""
    if run.epsilon is None or not math.isfinite(run.epsilon) or run.delta is None:
        return "How much that is cannot be said yet."
    epsilon = float(words.epsilon(run.epsilon))
    if epsilon > 20:
        factor = f"e^{epsilon:g}"
    else:
        factor = f"{math.ceil(math.exp(epsilon)):,}" if epsilon > 3 else f"{math.ceil(100 * math.exp(epsilon)) / 100:g}"
    seen, one = (
        ("all models of the run", "site") if run.privacy_unit == "client" else ("every upload of a site", "record")
    )
    judgement = next((verdict for most, verdict in _JUDGEMENTS if epsilon <= most), _NO_PROMISE)
    return (
        f"Somebody who sees {seen} and bets on whether one given {one} was in the training gets odds that are better "
        f"by a factor of at most {factor}, but for a chance of {words.chance(run.delta)} (delta). That is {judgement}: "
        "less is more private, and epsilon 0 would be perfect."
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
    messages = sum(one.asked for one in run.rounds)
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
