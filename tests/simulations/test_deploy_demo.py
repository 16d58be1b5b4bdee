"""The demonstration of a deployment: its files, its containers and what it prints; SuperLink and Docker are made up."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography import x509

from client.ledger import Ledger
from client.policy import SitePolicy
from common import datasets
from common.errors import DeploymentError
from deployment.processes import serve_command
from deployment.superlink import RunStatus
from simulations import deploy_demo
from simulations.benchmarks.shim import ShimCost
from simulations.demo_sites import DemoDeployment, prepare
from simulations.deploy_demo import Compose, compose_command, give_to_containers, main, wheels
from simulations.partition import split
from tests.run_logs import end_event, round_event, start_event, write_log
from tests.support import SMALL_MODEL, small_config, small_dataset

PROJECT = Path(__file__).parents[2]
STATUS = RunStatus(1, "finished", "completed", "", "", 10_000, 5000)
SETTINGS = [word for key in ("dataset=tests.support:small_dataset", f"model={SMALL_MODEL}") for word in ("--set", key)]


def finished(folder: Path) -> Path:
    parts = {name: round_event(1)[name] for name in ("uplink", "downlink")}
    return write_log(folder, start_event(), [round_event(1)], end_event(1, **parts)) / "run.jsonl"


@dataclass
class Link:
    """Stands for a SuperLink."""

    run: Callable[[], object] = lambda: None
    online: list[int] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    def see_through(self, app: Path, changes: dict[str, Any], tell: Callable[[str], None]) -> RunStatus:
        self.asked.append((app, changes))
        tell("round after round")
        self.run()
        return STATUS

    def wait_until_ready(self, seconds: float) -> None:
        self.asked.append(seconds)

    def register(self, key: Path, name: str) -> None:
        self.asked.append((key, name))

    def nodes(self) -> list[SimpleNamespace]:
        online = self.online.pop(0)
        return [SimpleNamespace(status="online" if number < online else "registered") for number in range(9)]


@dataclass
class Docker:
    """Stands for docker and docker-compose: notes the words of every command; one that begins with ``fails`` does."""

    log: Path | None = None
    fails: str = "nothing"
    asked: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(
        self, command: list[str], *, check: bool, capture_output: bool = False, text: bool = False, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        words = " ".join(command).removeprefix("docker compose ")
        assert capture_output == words.startswith(("version", "exec", "ps", "logs")), "what is read is not shown"
        assert not check, "a failure is told in our words"
        self.asked.append(words)
        self.environment = options.get("env", {})
        printed = self.log.read_text() if self.log and words.startswith("exec") else "printed"
        done = subprocess.CompletedProcess(command, int(words.startswith(self.fails)), "", "")
        if text:
            done.stdout, done.stderr = printed, "x" * 1000 + "last words"
        return done


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Docker:
    found = Docker(finished(tmp_path / "log"))
    monkeypatch.setattr(deploy_demo.subprocess, "run", found)
    monkeypatch.setattr(deploy_demo.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(deploy_demo.os, "getuid", lambda: 1234)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> DemoDeployment:
    folder = tmp_path_factory.mktemp("files")
    config = small_config(folder, sites=3)
    return prepare(folder / "all", small_dataset(), config, hosts=("gate",), limits={"max-rounds": "7"})


def test_every_site_has_its_share_its_policy_and_an_empty_ledger(files: DemoDeployment, tmp_path: Path) -> None:
    whole, config = small_dataset(), small_config(tmp_path, sites=3)
    assert (
        [site.name for site in files.sites]
        == [site.name for site in files.local_sites]
        == ["site-1", "site-2", "site-3"]
    )
    for site, rows in zip(files.sites, split(whole.train_targets, 3, config.partition, config.seed), strict=True):
        records = datasets.load(str(site.data))
        assert np.array_equal(records.train_inputs, whole.train_inputs[rows])
        assert np.array_equal(records.train_targets, whole.train_targets[rows])
        assert site.local.daemon_command == serve_command(site.data, site.policy, site.ledger, 80)
        assert site.local.keys == site.keys
        policy = SitePolicy.load(site.policy)
        assert (policy.epsilon, policy.delta, policy.models) == (config.epsilon, config.delta, (config.model,))
        assert (policy.max_steps_per_round, policy.max_rounds) == (config.steps_per_round, 7)
        assert policy.server_key == (files.server.public / "plan.pub").read_text().strip()
        ledger = Ledger(site.ledger)
        assert list(ledger.entries()) == []
        ledger.close()
    test = datasets.load(str(files.test_set))
    for inputs, targets in ((test.train_inputs, test.train_targets), (test.test_inputs, test.test_targets)):
        assert np.array_equal(inputs, whole.test_inputs) and np.array_equal(targets, whole.test_targets)
    assert files.runs.is_dir()
    for keys, name in (
        (files.server.link / "server.crt", "gate"),
        (files.sites[0].keys.daemon / "daemon.crt", "site-1"),
    ):
        certificate = x509.load_pem_x509_certificate(keys.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [name, "localhost"]
        lasts = certificate.not_valid_after_utc - certificate.not_valid_before_utc
        assert timedelta(days=30) <= lasts < timedelta(days=31)


@pytest.mark.parametrize("measured", [True, False])
def test_plain_processes_from_their_files_to_the_line_for_scripts(
    measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link, folder = Link(lambda: finished(folder / "server" / "runs" / "demo")), tmp_path / "new"

    @contextmanager
    def deployment(*given: Any) -> Iterator[SimpleNamespace]:
        assert given[0] == folder and [site.name for site in given[2]] == ["site-1", "site-2"]
        yield SimpleNamespace(link=link, processes=[1, 2, 3], gate="here:1")

    monkeypatch.setattr(deploy_demo, "LocalDeployment", deployment)
    monkeypatch.setattr(deploy_demo.shim, "measure", lambda folder: ShimCost(0.5, 2.0))
    assert main(["local", *SETTINGS, "--folder", str(folder), *([] if measured else ["--no-shim-cost"])]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == [
        f"keys, records, policies and ledgers of 2 sites are in {folder}",
        "3 processes run; sites reach the server at here:1",
        "round after round",
    ]
    ((app, changes),) = link.asked
    assert app == PROJECT and (changes["rounds"], changes["name"], changes["sites"]) == (8, "demo", 2)
    assert changes["out"] == str(folder / "server" / "runs") and changes["dataset"].endswith("/server/test/test.npz")
    assert changes["server-key"].endswith("plan.key")
    assert out[-2] == "rounds 1, accuracy 0.7740, epsilon 6.0000 at 1e-05"
    end = " shim_cpu_ratio=4.00" if measured else ""
    assert out[-1].startswith("BAR accuracy=0.7740 epsilon=6.0000 bytes_vs_superlink=") and out[-1].endswith(end)
    assert ("shim_cpu_ratio" in out[-1]) == measured
    said = "CPU of a node for one message: ours 0.500 s, plain Flower with torch 2.000 s"
    assert (said in out) == measured and any(line.startswith("the SuperLink's counters") for line in out)


def test_a_folder_is_named_after_the_time_and_sigterm_ends_what_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: Path, *given: Any, **named: Any) -> None:
        assert named == {"hosts": ("superlink", "gate")}
        raise DeploymentError(f"no room in {folder}")

    monkeypatch.setattr(deploy_demo, "prepare", refuse)
    monkeypatch.setattr(deploy_demo, "_PROJECT", tmp_path)
    assert main(["local", *SETTINGS]) == 2
    assert re.search(rf"no room in {tmp_path}/deployments/2\d{{7}}-\d{{6}}\n", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="143"):
        signal.raise_signal(signal.SIGTERM)


def test_containers_are_built_one_by_one_and_taken_down(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link, folder, reached = Link(online=[2]), tmp_path / "new", list[Any]()
    monkeypatch.setattr(deploy_demo, "SuperLink", lambda *given: reached.append(given) or link)
    assert main(["docker", *SETTINGS, "--folder", str(folder), "--no-shim-cost"]) == 0
    services = ("superlink", "node-1", "superexec", "site-1")
    assert docker.asked == [
        "version",
        *(f"build --quiet {service}" for service in services),
        "up --detach",
        "exec -T superexec cat /state/runs/demo/run.jsonl",
        "down --volumes --timeout 10",
    ]
    keys = [(folder / "keys" / name / "node.pub", name) for name in ("site-1", "site-2")]
    assert link.asked[:3] == [300, *keys]
    control = f"127.0.0.1:{docker.environment['FEDSIEVE_CONTROL_PORT']}"
    assert reached == [(control, folder / "keys" / "server" / "public" / "ca.crt")]
    places = {"out": "/state/runs", "dataset": "/test/test.npz", "server-key": "/keys/plan.key"}
    assert places.items() <= link.asked[3][1].items()
    assert "BAR accuracy=0.7740" in capsys.readouterr().out


def test_what_docker_cannot_do_is_told_and_what_runs_is_taken_down(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docker.fails = "up"
    assert main(["docker", *SETTINGS, "--folder", str(tmp_path / "new")]) == 2
    assert "deploy-demo: docker compose up --detach failed with exit code 1" in capsys.readouterr().err
    assert docker.asked[-1].startswith("down")
    monkeypatch.setattr(deploy_demo.shutil, "which", lambda name: None)
    assert main(["docker", *SETTINGS, "--folder", str(tmp_path / "other")]) == 2
    assert "neither 'docker compose' nor 'docker-compose' is installed" in capsys.readouterr().err


def test_containers_are_told_the_folder_the_ports_and_the_user(docker: Docker, files: DemoDeployment) -> None:
    for count, profile in ((2, ""), (3, "four-sites")):
        first = replace(files.sites[0], declared_size=79)
        compose = Compose(replace(files, sites=[first, *files.sites[1:count]]), "trial")
        assert compose.output("ps") == "printed" and docker.asked[-1] == "ps"
        told = docker.environment
        assert told["PATH"] == os.environ["PATH"] and told["FEDSIEVE_FOLDER"] == str(files.folder)
        assert (told["FEDSIEVE_DECLARED_SIZE"], told["FEDSIEVE_UID"]) == ("79", "1234")
        assert told["FEDSIEVE_CONTROL_PORT"] == str(compose.control_port) != told["FEDSIEVE_PORT"]
        assert (told["COMPOSE_PROJECT_NAME"], told["COMPOSE_PROFILES"]) == ("trial", profile)
    docker.fails = "ps"
    with pytest.raises(DeploymentError, match=r"^docker compose ps failed: x{990}last words$"):
        compose.output("ps")


def test_nodes_are_waited_for_and_not_for_ever(
    docker: Docker, files: DemoDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    compose, now = Compose(files, "trial"), [0.0]
    monkeypatch.setattr(deploy_demo.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(deploy_demo.time, "sleep", lambda seconds: now.append(now.pop() + 100 * seconds))
    link: Any = Link(online=[0, 2, 2, 3])
    compose.register_all(files, link)
    assert link.online == [] and now == [300]
    link = Link(online=[0, 2, 2, 2, 2, 3])
    with pytest.raises(DeploymentError, match="not all nodes came on line within 300 s:\nprinted"):
        compose.register_all(files, link)
    assert docker.asked[-1] == "logs --no-color --tail 20"


@pytest.mark.parametrize(
    ("installed", "works", "command"),
    [
        ({"docker", "docker-compose"}, True, ["docker", "compose"]),
        ({"docker", "docker-compose"}, False, ["docker-compose"]),
        ({"docker-compose"}, True, ["docker-compose"]),
    ],
)
def test_compose_is_version_2_or_else_1(
    installed: set[str], works: bool, command: list[str], docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy_demo.shutil, "which", lambda name: name if name in installed else None)
    docker.fails = "nothing" if works else "version"
    assert compose_command() == command


def test_wheels_are_lent_and_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch-1.whl", "torch-2.whl", "numpy-1.whl"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1000, 1000))
    monkeypatch.setattr(deploy_demo, "_PROJECT", tmp_path / "project")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} https://elsewhere")
    there = tmp_path / "project" / "docker" / "wheels"
    there.mkdir(parents=True)
    (there / "torch-2.whl").write_text("mine")
    with wheels():
        lent = {path.name: path.read_text() for path in there.iterdir()}
        assert lent == {"torch-1.whl": "torch-1.whl", "torch-2.whl": "mine"}
        assert (there / "torch-1.whl").stat().st_mtime == 1000
    assert [path.name for path in there.iterdir()] == ["torch-2.whl"]


def test_files_of_root_are_given_to_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    given: list[tuple[Path, int, int]] = []
    monkeypatch.setattr(deploy_demo.os, "chown", lambda *change: given.append(change))
    monkeypatch.setattr(deploy_demo.os, "getuid", lambda: 1234)
    assert give_to_containers(tmp_path) == 1234 and given == []
    monkeypatch.setattr(deploy_demo.os, "getuid", lambda: 0)
    assert give_to_containers(tmp_path) == 10001
    assert given == [(path, 10001, 10001) for path in (tmp_path, *(tmp_path.rglob("*")))] and len(given) == 3
