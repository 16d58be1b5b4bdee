"""``make deploy-local`` and ``make deploy-demo``: a deployment on the shipped data, as processes or in containers.

Makes keys and sites, starts everything, registers the nodes, runs a private federated training over TLS, prints
accuracy, epsilon and bytes beside the SuperLink's own counters, and shuts down.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import datasets
from common.config import ConfigValue, RunConfig, parse_assignment
from common.errors import DeploymentError, FedsieveError
from deployment.counters import compare
from deployment.processes import LocalDeployment, hold_port, port_of
from deployment.superlink import RunStatus, SuperLink
from server.runlog import Event, read_events
from simulations.benchmarks import shim
from simulations.demo_sites import DemoDeployment, prepare
from simulations.run import config_with, defaults

_PROJECT = Path(__file__).resolve().parent.parent
_RUN = "demo"
_SETTINGS: dict[str, ConfigValue] = {"sites": 2, "rounds": 8, "name": _RUN}
_START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left: its log, and the run as the SuperLink saw it."""

    events: list[Event]
    status: RunStatus


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("local", "docker"), help="plain processes, or containers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the run config")
    parser.add_argument("--folder", type=Path, help="new folder for keys, sites and runs (default: deployments/TIME)")
    parser.add_argument("--no-shim-cost", action="store_true", help="leave out the measurement of the shim")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    try:
        changes = dict(parse_assignment(assignment, defaults()) for assignment in options.set)
        config = config_with({**_SETTINGS, **changes})
        folder = (options.folder or _PROJECT / "deployments" / time.strftime("%Y%m%d-%H%M%S")).resolve()
        files = prepare(folder, datasets.load(config.dataset), config, hosts=("superlink", "gate"))
        print(f"keys, records, policies and ledgers of {config.sites} sites are in {folder}")
        outcome = _run_local(files, config) if options.engine == "local" else _run_docker(files, config)
        _report(outcome, config, None if options.no_shim_cost else _shim_ratio())
    except FedsieveError as error:
        print(f"deploy-demo: {error}", file=sys.stderr)
        return 2
    return 0


def _run_local(files: DemoDeployment, config: RunConfig) -> Outcome:
    with LocalDeployment(files.folder, files.server, files.local_sites) as deployment:
        print(f"{len(deployment.processes)} processes run; sites reach the server at {deployment.gate}")
        places = {"out": files.runs, "dataset": files.test_set, "server-key": files.server.plan_key}
        status = _see_through(deployment.link, config, {key: str(place) for key, place in places.items()})
    return Outcome(list(read_events(files.runs / _RUN / "run.jsonl")), status)


def _run_docker(files: DemoDeployment, config: RunConfig) -> Outcome:
    with containers(files) as compose:
        link = SuperLink(f"127.0.0.1:{compose.control_port}", files.server.ca)
        compose.register_all(files, link)
        places = {"out": "/state/runs", "dataset": "/test/test.npz", "server-key": "/keys/plan.key"}
        status = _see_through(link, config, places)
        log = compose.output("exec", "-T", "superexec", "cat", f"/state/runs/{_RUN}/run.jsonl")
    return Outcome([json.loads(line) for line in log.splitlines()], status)


def _see_through(link: SuperLink, config: RunConfig, places: Mapping[str, str]) -> RunStatus:
    return link.see_through(_PROJECT, {**config.to_mapping(), **places}, tell=lambda text: print(text, flush=True))


class Compose:
    """docker-compose on this checkout, with the files of a deployment."""

    def __init__(self, files: DemoDeployment, project: str) -> None:
        self._command = compose_command()
        with hold_port() as one, hold_port() as other:  # no longer: Docker itself listens there
            self.control_port, gate_port = port_of(one), port_of(other)
        self.project = project
        profile = "" if len(files.sites) <= 2 else "four-sites"
        self._environment = {
            **os.environ,
            "FEDSIEVE_FOLDER": str(files.folder),
            "FEDSIEVE_DECLARED_SIZE": str(files.sites[0].declared_size),
            "FEDSIEVE_UID": str(give_to_containers(files.folder)),
            "FEDSIEVE_CONTROL_PORT": str(self.control_port),
            "FEDSIEVE_PORT": str(gate_port),
            "COMPOSE_PROJECT_NAME": project,
            "COMPOSE_PROFILES": profile,
        }

    def __call__(self, *words: str) -> None:
        """Run docker-compose."""
        done = subprocess.run([*self._command, *words], cwd=_PROJECT, env=self._environment, check=False)
        if done.returncode:
            raise DeploymentError(f"{' '.join((*self._command, *words))} failed with exit code {done.returncode}")

    def output(self, *words: str) -> str:
        """Run docker-compose and return what it prints."""
        done = subprocess.run(
            [*self._command, *words], cwd=_PROJECT, env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DeploymentError(f"{' '.join((*self._command, *words))} failed: {done.stderr[-1000:]}")
        return done.stdout

    def register_all(self, files: DemoDeployment, link: SuperLink) -> None:
        """Let the nodes of all sites in, once the SuperLink answers, and wait until they are there."""
        link.wait_until_ready(_START_SECONDS)
        for site in files.sites:
            link.register(site.keys.public, site.name)
        deadline = time.monotonic() + _START_SECONDS
        while [node.status for node in link.nodes()].count("online") < len(files.sites):
            if time.monotonic() > deadline:
                logs = self.output("logs", "--no-color", "--tail", "20")
                raise DeploymentError(f"not all nodes came on line within {_START_SECONDS:g} s:\n{logs}")
            time.sleep(1.0)


@contextmanager
def containers(files: DemoDeployment, project: str = "fedsieve-demo") -> Iterator[Compose]:
    """Build the images, start the containers, and take them and their volumes down in the end."""
    compose = Compose(files, project)
    for service in ("superlink", "node-1"):  # one after the other: they share layers
        compose("build", "--quiet", service)
    with wheels():
        for service in ("superexec", "site-1"):
            compose("build", "--quiet", service)
    try:
        compose("up", "--detach")
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "10")


def compose_command() -> list[str]:
    """Return the command of Compose v2, or of v1 where that is what is installed."""
    if (
        shutil.which("docker")
        and not subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    ):
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise DeploymentError("neither 'docker compose' nor 'docker-compose' is installed: 'make deploy-local' needs none")


@contextmanager
def wheels() -> Iterator[None]:
    """Lend the image builds the wheels of torch that pip finds on this machine, if there are any."""
    lent: list[Path] = []
    for place in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in Path(place).glob("torch-*.whl") if Path(place).is_dir() else ():
            copy = _PROJECT / "docker" / "wheels" / wheel.name
            if not copy.exists():
                shutil.copyfile(wheel, copy)
                shutil.copystat(wheel, copy)  # the builder's cache looks at the time, too
                lent.append(copy)
    try:
        yield
    finally:
        for copy in lent:
            copy.unlink()


def give_to_containers(folder: Path) -> int:
    """Return the user that containers run as: the one who owns the files, or another where that is root."""
    if os.getuid() != 0:
        return os.getuid()
    user = 10001
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user)
    return user


def _shim_ratio() -> float:
    with tempfile.TemporaryDirectory() as folder:
        cost = shim.measure(Path(folder))
    print(f"CPU of a node for one message: ours {cost.ours:.3f} s, plain Flower with torch {cost.plain:.3f} s")
    return cost.ratio


def _report(outcome: Outcome, config: RunConfig, shim_ratio: float | None) -> None:
    end = outcome.events[-1]
    comparison = compare(outcome.events, outcome.status)
    print(comparison.table())
    print(f"rounds {end['rounds']}, accuracy {end['accuracy']:.4f}, epsilon {end['epsilon']:.4f} at {config.delta:g}")
    shim = "" if shim_ratio is None else f" shim_cpu_ratio={shim_ratio:.2f}"
    print(
        f"BAR accuracy={end['accuracy']:.4f} epsilon={end['epsilon']:.4f} "
        f"bytes_vs_superlink={comparison.ratio:.4f}{shim}"
    )


if __name__ == "__main__":
    sys.exit(main())
