"""``fedsieve keys`` and ``fedsieve deploy``: what the operators of a deployment need."""

import argparse
import os
import tomllib
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from common.config import ConfigValue, RunConfig, parse_assignment
from common.errors import ConfigError
from common.signing import PlanSigner

if TYPE_CHECKING:
    from deployment.superlink import SuperLink

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_PROJECT = Path(__file__).resolve().parent.parent
_YEARS_2 = 730
_HERE = ("localhost", "127.0.0.1")
_SERVER_HOSTS = ("superlink", *_HERE)  # the first is its name among the containers of docker-compose.yml


def add_keys(commands: Commands) -> None:
    """Add the subcommands of ``fedsieve keys``."""
    actions = commands.add_parser("keys", help="keys of a deployment").add_subparsers(required=True, metavar="COMMAND")
    init = actions.add_parser("init", help="make the server's keys: CA, certificate, plan key, what sites get")
    init.add_argument("folder", type=Path, help="new folder for the server's keys")
    init.set_defaults(run=_init)
    renew = actions.add_parser("renew", help="replace the server's certificate; needs ca.key")
    renew.add_argument("folder", type=Path, help="folder of the server's keys")
    renew.set_defaults(run=_renew)
    for parser in (init, renew):
        _add_hosts(parser, "name or address at which sites reach the SuperLink", _SERVER_HOSTS)
    site = actions.add_parser("add-site", help="make a site's keys: its node's, its shim's and its daemon's")
    site.add_argument("folder", type=Path, help="new folder for the site's keys; its name is the site's")
    site.add_argument("--server", type=Path, required=True, metavar="PUBLIC", help="folder that the server gave out")
    _add_hosts(site, "name or address at which the shim reaches the site's daemon", _HERE)
    site.set_defaults(run=_add_site)
    server = actions.add_parser("server", help="make the key that signs plans alone, and print its public half")
    server.add_argument("key", type=Path, help="file to write the key to; keep it secret")
    server.set_defaults(run=_server_key)


def _add_hosts(parser: argparse.ArgumentParser, about: str, always: tuple[str, ...]) -> None:
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help=f"{about}; may be repeated (always: {', '.join(always)})",
    )
    parser.add_argument("--days", type=int, default=_YEARS_2, help=f"days that it is good for (default {_YEARS_2})")
    parser.set_defaults(always=always)


def _hosts(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*options.host, *options.always)))


def _init(options: argparse.Namespace) -> int:
    from deployment.keys import ServerKeys

    keys = ServerKeys.create(options.folder, _hosts(options), options.days)
    print(f"made {keys.folder} for a SuperLink at {', '.join(_hosts(options))}")
    print(f"give {keys.public} to every site; put {keys.folder / 'ca.key'} where no server reads it")
    return 0


def _renew(options: argparse.Namespace) -> int:
    from deployment.keys import ServerKeys

    keys = ServerKeys(options.folder)
    keys.renew(_hosts(options), options.days)
    print(f"replaced {keys.link / 'server.crt'}: restart the SuperLink")
    return 0


def _add_site(options: argparse.Namespace) -> int:
    from deployment.keys import SiteKeys

    try:
        plan_key = (options.server / "plan.pub").read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the server's plan.pub: {error}; ask its operator for the folder 'public'"
        ) from None
    keys = SiteKeys.create(options.folder, options.server / "ca.crt", _hosts(options), options.days)
    print(f"made {keys.folder}; give {keys.public} to the server's operator, and nothing else of it to anybody")
    print(f'the site\'s policy names the server that it obeys:\nserver-key = "{plan_key}"')
    return 0


def _server_key(options: argparse.Namespace) -> int:
    signer = PlanSigner.create(options.key)
    print(f"wrote {options.key}: name it in the run config (server-key). Sites name the public key in their policy:")
    print(f'server-key = "{signer.public_key}"')
    return 0


def add_deploy(commands: Commands) -> None:
    """Add the subcommands of ``fedsieve deploy``."""
    deploy = commands.add_parser("deploy", help="run over a SuperLink")
    actions = deploy.add_subparsers(required=True, metavar="COMMAND")
    run = actions.add_parser(
        "run",
        help="submit a run and see it through",
        description="Submit a run and watch it to its end. Where its ServerApp or the SuperLink is lost, it is "
        "submitted again and goes on from its checkpoint; no site is charged twice.",
    )
    run.add_argument("--name", help="name of the run and of its folder on the server")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the run config")
    run.add_argument("--resume", action="store_true", help="go on with the run of this name from its checkpoint")
    run.add_argument("--app", type=Path, default=_PROJECT, help="checkout to run (default: the one of this command)")
    run.add_argument("--detach", action="store_true", help="return once it is submitted")
    run.set_defaults(run=_run)
    status = actions.add_parser("status", help="the nodes, the runs, and the SuperLink's own counters")
    status.set_defaults(run=_status)
    logs = actions.add_parser("logs", help="what a run has logged and logs")
    logs.add_argument("run_id", type=int, nargs="?", help="run (default: the latest)")
    logs.set_defaults(run=_logs)
    register = actions.add_parser("register", help="let a site's node in")
    register.add_argument("public_key", type=Path, help="the site's node.pub")
    register.add_argument("--name", default="", help="name to list it under (default: its folder's)")
    register.set_defaults(run=_register)
    unregister = actions.add_parser("unregister", help="let a site's node in no more")
    unregister.add_argument("node_id", type=int, help="node, as 'fedsieve deploy status' lists it")
    unregister.set_defaults(run=_unregister)
    stop = actions.add_parser("stop", help="end a run; its checkpoint stays")
    stop.add_argument("run_id", type=int)
    stop.set_defaults(run=_stop)
    for parser in (run, status, logs, register, unregister, stop):
        parser.add_argument(
            "--superlink",
            default=os.environ.get("FEDSIEVE_SUPERLINK", "127.0.0.1:8000"),
            metavar="HOST:PORT",
            help="where the SuperLink listens (default: $FEDSIEVE_SUPERLINK or 127.0.0.1:8000)",
        )
        parser.add_argument(
            "--ca",
            type=Path,
            default=os.environ.get("FEDSIEVE_CA"),
            metavar="FILE",
            help="ca.crt of the server's keys (default: $FEDSIEVE_CA)",
        )


def _link(options: argparse.Namespace) -> "SuperLink":
    from deployment.superlink import SuperLink

    if options.ca is None:
        raise ConfigError("give --ca PUBLIC/ca.crt, or set FEDSIEVE_CA: it proves that the SuperLink is the right one")
    return SuperLink(options.superlink, Path(options.ca))


def run_changes(assignments: list[str], project: Path = _PROJECT) -> dict[str, ConfigValue]:
    """Parse key=value assignments and check the run config that they make, before anybody is asked."""
    defaults = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    changes = dict(parse_assignment(assignment, defaults) for assignment in assignments)
    RunConfig.parse({**defaults, **changes})
    return changes


def _run(options: argparse.Namespace) -> int:
    changes = run_changes(options.set, options.app)
    if options.name:
        changes["name"] = options.name
    if not changes.get("name"):
        raise ConfigError("a run of a deployment needs a name, so that it can go on after a crash: give --name")
    if options.resume:
        changes["resume"] = True
    link = _link(options)
    if options.detach:
        print(f"run {link.start(options.app, changes)} submitted")
        return 0
    status = link.see_through(options.app, changes, tell=lambda text: print(text, flush=True))
    print(f"run {status.run_id} completed")
    for line in link.logs(status.run_id):
        print(line, end="")
    return 0


def _status(options: argparse.Namespace) -> int:
    link = _link(options)
    nodes, runs = link.nodes(), link.runs()
    print(f"{len(nodes)} nodes at {link.address}")
    for node in nodes:
        print(f"  {node.name or '-':<20} {node.status:<12} {node.node_id}")
    print(f"{len(runs)} runs, with the bytes of the SuperLink's own counters")
    for run in runs:
        when = datetime.fromisoformat(run.pending_at)
        state = run.outcome or run.status
        bytes_ = f"{run.bytes_sent} to sites, {run.bytes_received} from sites"
        print(f"  {run.run_id:<20} {state:<12} {when:%Y-%m-%d %H:%M} {bytes_} {run.details if run.finished else ''}")
    return 0


def _logs(options: argparse.Namespace) -> int:
    link = _link(options)
    run_id = options.run_id
    if run_id is None:
        runs = link.runs()
        if not runs:
            raise ConfigError(f"there are no runs at {link.address} yet: 'fedsieve deploy run' starts one")
        run_id = runs[0].run_id
    for line in link.logs(run_id):
        print(line, end="", flush=True)
    return 0


def _register(options: argparse.Namespace) -> int:
    node_id = _link(options).register(options.public_key, options.name)
    print(f"registered node {node_id}")
    return 0


def _unregister(options: argparse.Namespace) -> int:
    _link(options).unregister(options.node_id)
    print(f"node {options.node_id} is let in no more")
    return 0


def _stop(options: argparse.Namespace) -> int:
    _link(options).stop(options.run_id)
    print(f"run {options.run_id} stopped; 'fedsieve deploy run --resume --name NAME' goes on")
    return 0
