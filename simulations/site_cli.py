"""``fedsieve site``, ``ledger`` and ``audit``: what the operators of sites need."""

import argparse
import csv
import json
import sys
from dataclasses import asdict, astuple, fields
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from client.channel import Access
from client.ledger import Ledger
from client.policy import SitePolicy
from common.accounting import epsilon_of
from common.charges import NEIGHBOURS, Charge, neighbours_of
from common.errors import ConfigError

Commands = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_ledger(commands: Commands) -> None:
    """Add the subcommands of ``fedsieve ledger``."""
    ledger = commands.add_parser("ledger", help="a site's privacy ledger: what was spent, and by whom")
    actions = ledger.add_subparsers(required=True, metavar="COMMAND")
    for name, about, action in (
        ("create", "make a new, empty ledger", _create),
        ("show", "what was spent by each run, and what is left", _show),
        ("verify", "check every entry and the chain that binds them", _verify),
        ("export", "print all entries as CSV", _export),
    ):
        parser = actions.add_parser(name, help=about)
        parser.add_argument("ledger", type=Path, help="file of the ledger")
        if name == "show":
            parser.add_argument("--policy", type=Path, help="the site's policy: what is left of its budget")
            parser.add_argument("--delta", type=float, help="delta to show epsilon at, without a policy")
        parser.set_defaults(run=action)


def add_site(commands: Commands) -> None:
    """Add the subcommands of ``fedsieve site``."""
    actions = commands.add_parser("site", help="a site's daemon").add_subparsers(required=True, metavar="COMMAND")
    serve = actions.add_parser("serve", help="serve this site's data to plans that its policy allows")
    serve.add_argument("--data", required=True, help="the site's records: .npz file, folder or package.module:function")
    serve.add_argument("--policy", type=Path, required=True, help="TOML file of what this site allows")
    serve.add_argument("--ledger", type=Path, required=True, help="the site's ledger ('fedsieve ledger create')")
    serve.add_argument(
        "--declared-size", type=int, metavar="N", help="number of records to make public: about as many as there are"
    )
    serve.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    serve.add_argument("--threads", type=int, default=0, help="torch threads (default: all cores)")
    _add_access(serve, "--listen", "HOST:PORT or unix:PATH to listen on")
    serve.set_defaults(run=_serve)
    status = actions.add_parser("status", help="what a daemon is doing, and what has been spent")
    _add_access(status, "--address", "HOST:PORT or unix:PATH of the daemon")
    status.set_defaults(run=_status)


def _add_access(parser: argparse.ArgumentParser, flag: str, about: str) -> None:
    parser.add_argument(flag, dest="address", default="127.0.0.1:9301", help=f"{about} (default 127.0.0.1:9301)")
    for name, text in (("ca", "CA's certificate"), ("certificate", "own certificate"), ("key", "key of it")):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help=f"mutual TLS: {text}")
    parser.add_argument(
        "--token", type=Path, metavar="FILE", help="secret that both sides know; between hosts it needs TLS too"
    )


def _access(options: argparse.Namespace) -> Access:
    return Access(
        address=options.address,
        ca=options.tls_ca,
        certificate=options.tls_certificate,
        key=options.tls_key,
        token=options.token,
    )


def _serve(options: argparse.Namespace) -> int:
    import logging
    import signal
    import threading

    import numpy as np

    from client.data import SiteData  # torch: only where it is asked for
    from client.memory import keep_freed_memory
    from client.randomness import OsRandomness
    from client.service import Daemon
    from client.site import Guard, Site, Workbench
    from common import datasets

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, force=True)
    policy, access = SitePolicy.load(options.policy), _access(options)
    dataset = datasets.load(options.data)
    count = len(dataset.train_targets)
    if not options.declared_size:
        raise ConfigError(
            "--declared-size is missing: the number of records that this site makes public, by which its sums are "
            "divided. The exact number would tell whether one more person is in. Expected a number of yours near "
            f"it, such as --declared-size {_rounded(count)}"
        )
    data = SiteData(dataset.train_inputs, dataset.train_targets, np.arange(count), options.declared_size)
    workbench = Workbench(options.device)
    keep_freed_memory()
    ledger = Ledger(options.ledger)
    guard = Guard(policy, ledger)
    site = Site(data, OsRandomness(), workbench, guard)
    for model in policy.models:
        site.require_fit(model)  # wrong names and records show at the start, and the first round finds its model warm
    daemon = Daemon(site, guard, access, options.threads)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    daemon.start()
    logging.info("serving %d declared records at %s", data.declared_size, options.address)
    if not policy.server_key:
        logging.warning("the policy names no server-key: whoever reaches %s can spend the budget", options.address)
    stopped.wait()
    daemon.stop()
    ledger.close()
    logging.info("stopped")
    return 0


def _rounded(count: int) -> int:
    """Return a number near ``count`` that many counts round to: 1,437 gives 1,500, 98 gives 100, 3 gives 10."""
    step = max(10, 10 ** (len(str(count)) - 1) // 2)
    return max(step, round(count / step) * step)


def _status(options: argparse.Namespace) -> int:
    from client.remote import RemoteSite

    status = RemoteSite(_access(options)).status()
    doing = f"training round {status.round} of {status.run}" if status.training else "idle"
    if status.training:
        doing += f", step {status.progress.steps_done} of {status.progress.steps}"
    print(f"fedsieve {status.version}: {doing}")
    budget = f"{status.epsilon_budget:g} at delta {status.delta:g} per record ({NEIGHBOURS})"
    print(f"{status.entries} charges, epsilon {status.epsilon_spent:.4f} of {budget}")
    return 0


def add_audit(commands: Commands) -> None:
    """Add ``fedsieve audit``."""
    audit = commands.add_parser(
        "audit",
        help="attack the mechanism with canaries: a lower bound on epsilon beside the claimed one",
        description="One-run auditing (Steinke, Nasr and Jagielski 2023) on the code that sites run. A lower bound "
        "above the claimed epsilon is the proof of a fault; one below it proves nothing but is what was tried.",
    )
    audit.add_argument(
        "--run-folder", type=Path, metavar="RUN", help="audit the mechanism of this run; its report says so"
    )
    audit.add_argument("--epsilon", type=float, default=1.0, help="claimed epsilon, without a run (default 1)")
    audit.add_argument("--delta", type=float, default=1e-5, help="delta, without a run (default 1e-5)")
    audit.add_argument("--method", default="random", help="method, without a run ('fedsieve methods'; default random)")
    audit.add_argument("--unit", choices=("record", "client"), default="record", help="privacy unit, without a run")
    audit.add_argument(
        "--canaries", type=int, default=5000, help="records, or sites, that try to be seen (default 5000)"
    )
    audit.add_argument("--seed", type=int, default=1, help="decides which canaries are in")
    audit.add_argument("--to", type=Path, metavar="FILE", help="where to write the result (default: audit.json)")
    audit.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    from simulations import audit, audit_plan  # torch: only where it is asked for

    folder: Path | None = options.run_folder
    if folder:
        plan = audit_plan.plan_of_run(folder)
    else:
        asked = (options.unit, options.epsilon, options.delta)
        plan = audit_plan.plan_for(*asked, method=options.method, canaries=options.canaries)
    result = audit.audit(plan, options.canaries, options.seed)
    to = options.to or (folder or Path()) / audit.AUDIT_NAME
    to.write_text(json.dumps({**asdict(result), "plan": asdict(plan)}, indent=1) + "\n")
    unit = f"per {plan.privacy_unit} ({neighbours_of(plan.privacy_unit)})"
    print(f"claimed      epsilon {result.claimed_epsilon:.4f} at delta {result.delta:g} {unit}")
    print(f"lower bound  epsilon {result.lower_bound:.4f} with 95 % confidence")
    print(f"guesses      {result.right} of {result.guesses} right, {result.canaries} canaries")
    print("the claim stands" if result.passed else "THE CLAIM IS WRONG: more leaks than epsilon allows")
    print(f"written to {to}")
    print(
        f"BAR claimed_epsilon={result.claimed_epsilon:.4f} lower_bound={result.lower_bound:.4f} "
        f"canaries={result.canaries}"
    )
    return 0 if result.passed else 1


def _create(options: argparse.Namespace) -> int:
    Ledger.create(options.ledger).close()
    print(f"made {options.ledger}; back it up together with {options.ledger.name}.head")
    return 0


def _verify(options: argparse.Namespace) -> int:
    ledger = Ledger(options.ledger)
    print(f"{options.ledger}: {sum(1 for _ in ledger.entries())} entries, the chain is whole")
    ledger.close()
    return 0


def _show(options: argparse.Namespace) -> int:
    policy = SitePolicy.load(options.policy) if options.policy else None
    if policy is None and options.delta is None:
        raise ConfigError("epsilon is always at some delta: give --policy site.toml or --delta 1e-5")
    delta, accountant = (policy.delta, policy.accountant) if policy else (options.delta, "rdp")
    ledger = Ledger(options.ledger)
    runs: dict[tuple[str, str], list[Charge]] = {}
    since: dict[tuple[str, str], float] = {}
    for entry in ledger.entries():
        who = (entry.server, entry.run)
        runs.setdefault(who, []).append(entry.charge)
        since.setdefault(who, entry.time)
    table = Table(title=f"{options.ledger}: epsilon at delta {delta:g} per record ({NEIGHBOURS})", title_justify="left")
    for heading in ("run", "asked by", "first asked", "rounds", "steps", "epsilon alone"):
        table.add_column(heading, justify="right" if heading in ("rounds", "steps", "epsilon alone") else "left")
    for (server, run), charges in runs.items():
        table.add_row(
            run,
            server[:16] or "not signed",
            f"{datetime.fromtimestamp(since[server, run], UTC):%Y-%m-%d %H:%M} UTC",
            f"{len(charges)}",
            f"{sum(charge.steps for charge in charges)}",
            f"{epsilon_of(charges, delta, accountant):.4f}",
        )
    spent = epsilon_of(ledger.history, delta, accountant)
    ledger.close()
    console = Console()
    console.print(table)
    left = "" if policy is None else f" of {policy.epsilon:g}, {max(0.0, policy.epsilon - spent):.4f} left"
    console.print(f"all runs together: epsilon {spent:.4f}{left}", highlight=False)
    return 0


def _export(options: argparse.Namespace) -> int:
    ledger = Ledger(options.ledger)
    out = csv.writer(sys.stdout)
    mechanism_columns = [field.name for field in fields(Charge)]
    out.writerow(("number", "time", "server", "run", "round", *mechanism_columns, "plan", "hash"))
    for entry in ledger.entries():
        charge = entry.charge
        mechanism = astuple(charge)
        out.writerow(
            (entry.number, entry.time, entry.server, entry.run, entry.round, *mechanism, entry.plan, entry.hash)
        )
    ledger.close()
    return 0
