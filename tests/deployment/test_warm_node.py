"""The warm helper of a node, before a Flower that writes down who runs it: ``flower-supernode`` is a stand-in, too."""

import importlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployment import warm_node

PROJECT = Path(__file__).parents[2]
# Has warm_node find what stands beside another interpreter. Ctrl-C is ignored by what a shell runs in the background.
LAUNCH = """\
import signal, sys
from deployment import warm_node
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.executable = sys.argv.pop(1)
warm_node.main()
"""
NODE = '#!/bin/sh\necho "$@" > {here}/node.args\necho "$PATH" > {here}/node.path\nexec cat\n'
SLOW = '#!/bin/sh\necho "$@" >> {here}/slow\n'
CLIENT_APP = """\
import json, os, pathlib, signal, sys, time
HERE = pathlib.Path({here!r})
if (HERE / "broken").exists():
    raise ImportError("Flower is broken")
def flwr_clientapp():
    handlers = [signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]
    me = {{"arguments": sys.argv, "pid": os.getpid(), "parent": os.getppid(), "handlers": handlers}}
    with open(HERE / "served", "a") as file:
        file.write(json.dumps(me) + "\\n")
    while (HERE / "hold").exists():
        time.sleep(0.01)
    print("said", end="")
    print("warned", end="", file=sys.stderr)
    match sys.argv[-1]:
        case "--leave":
            sys.exit("left")
        case "--fail":
            raise RuntimeError("the app failed")
"""


class Node:
    """A running node, as SuperExec and its operator see it."""

    def __init__(self, here: Path, process: "subprocess.Popen[bytes]") -> None:
        self.here, self.process = here, process

    @property
    def stub(self) -> Path:
        """What is found as 'flwr-clientapp'."""
        return Path(self.text("node.path").split(os.pathsep)[0]) / "flwr-clientapp"

    @property
    def served(self) -> list[dict[str, Any]]:
        """What the helper's ClientApps wrote down."""
        return [json.loads(line) for line in self.text("served").splitlines()]

    def text(self, name: str) -> str:
        path = self.here / name
        return path.read_text() if path.exists() else ""

    def ask(self, *arguments: str) -> int:
        """Start a ClientApp as SuperExec does, and return once the stub is done."""
        return subprocess.run([self.stub, *arguments], timeout=20, check=False).returncode

    def asked(self, *arguments: str) -> dict[str, Any]:
        """Return what a ClientApp wrote down that the helper started."""
        before = len(self.served)
        assert self.ask(*arguments) == 0
        wait_until(lambda: len(self.served) > before)
        return self.served[before]


def wait_until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def state(pid: int) -> str:
    """Return a process's state: Z where it has ended and nobody has asked how, nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def install(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@contextmanager
def running(here: Path, *, beside: bool = True) -> Iterator[Node]:
    """Run a node until the end of the block; ``beside`` the interpreter is Flower's own, or else on the PATH."""
    programs, others, packages = here / "bin", here / "others", here / "packages"
    for folder in (programs, others, packages / "flwr" / "supernode", packages / "google" / "protobuf"):
        folder.mkdir(parents=True)
    for module in ("flwr/__init__", "flwr/clientapp", "flwr/supernode/__init__", "google/protobuf/__init__"):
        (packages / f"{module}.py").touch()
    for module in ("grpc", "numpy"):
        (packages / f"{module}.py").touch()
    (packages / "flwr" / "supernode" / "cli.py").write_text(CLIENT_APP.format(here=str(here)))
    (programs / "python").symlink_to(Path(sys.executable).resolve())
    install(programs if beside else others, "flower-supernode", NODE.format(here=here))
    install(programs if beside else others, "flwr-clientapp", SLOW.format(here=here))
    environment = {
        **os.environ,
        "PATH": f"{others}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "PYTHONPATH": f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "",
    }
    with (here / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(programs / "python"), "--superlink", "link:1"],
            cwd=PROJECT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    assert process.stdin is not None
    try:
        wait_until(lambda: (here / "node.path").exists() and (here / "node.path").read_text())
        yield Node(here, process)
    finally:
        (here / "hold").unlink(missing_ok=True)
        process.stdin.close()
        process.wait(20)


def test_the_helper_serves_and_the_slow_way_is_not_gone(tmp_path: Path) -> None:
    with running(tmp_path) as node:
        assert node.text("node.args") == "--superlink link:1\n"
        assert node.text("node.path").split(os.pathsep)[1:] == [str(tmp_path / "others"), "/usr/bin", "/bin\n"]
        first, second = node.asked("--token", "x y"), node.asked()
        assert first["arguments"] == ["flwr-clientapp", "--token", "x y"]
        assert second["arguments"] == ["flwr-clientapp"]
        assert first["parent"] == second["parent"] != node.process.pid  # the helper's
        assert first["pid"] != second["pid"]
        assert first["handlers"] == [True, True]
        wait_until(lambda: node.text("log").count("said") == node.text("log").count("warned") == 2)
    assert not node.text("slow")


def test_the_helper_is_for_its_user_and_goes_with_its_node_alone(tmp_path: Path) -> None:
    with running(tmp_path) as node:
        stub, helper = node.stub, node.asked()["parent"]
        assert stat.S_IMODE(stub.stat().st_mode) == 0o700
        assert stat.S_IMODE(stub.parent.stat().st_mode) == 0o700
        os.kill(helper, signal.SIGINT)  # Ctrl-C is for the node
        os.kill(helper, signal.SIGTERM)
        assert node.asked()["parent"] == helper
    wait_until(lambda: state(helper) in ("", "Z"))
    assert not stub.parent.exists()
    assert not node.text("slow") and "Traceback" not in node.text("log")


def test_client_apps_that_have_ended_are_cleared_away(tmp_path: Path) -> None:
    with running(tmp_path) as node:
        (tmp_path / "hold").touch()
        ended = [node.asked()["pid"], node.asked()["pid"]]
        (tmp_path / "hold").unlink()
        wait_until(lambda: [state(pid) for pid in ended] == ["Z", "Z"])
        node.asked()
        assert [state(pid) for pid in ended] == ["", ""]


def test_without_the_helper_client_apps_start_the_slow_way(tmp_path: Path) -> None:
    with running(tmp_path) as node:
        (tmp_path / "hold").touch()  # one that the helper started goes on
        os.kill(node.asked()["parent"], signal.SIGKILL)
        assert node.ask("--token", "t") == 0
        assert node.text("slow") == "--token t\n"


def test_a_helper_that_fails_says_so_and_client_apps_start_the_slow_way(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with running(tmp_path) as node:
        wait_until(lambda: "the warm helper has failed: ClientApps start the slow way" in node.text("log"))
        assert "ImportError: Flower is broken" in node.text("log")
        assert node.ask("--token", "t") == 0
        assert node.text("slow") == "--token t\n"
        stub = node.stub
    wait_until(lambda: not stub.parent.exists())


def test_a_client_app_that_fails_says_so_and_the_helper_serves_the_next(tmp_path: Path) -> None:
    with running(tmp_path) as node:
        helper = node.asked("--fail")["parent"]
        wait_until(lambda: "RuntimeError: the app failed" in node.text("log"))
        assert node.asked("--leave")["parent"] == helper
        wait_until(lambda: node.text("log").count("said") == 2)
        with socket.socket(socket.AF_UNIX) as asker:  # a stub that is killed before it has asked
            asker.connect(str(node.stub.parent / "helper.sock"))
            asker.sendall(b"[")
        assert node.asked()["parent"] == helper
        assert "left" not in node.text("log") and "failed:" not in node.text("log")


def test_flower_is_found_beside_the_interpreter_or_on_the_path(tmp_path: Path) -> None:
    with running(tmp_path, beside=False) as node:
        assert node.asked()["arguments"] == ["flwr-clientapp"]


def test_a_missing_flower_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCH, str(tmp_path / "python")]
    environment = {**os.environ, "PATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == f"flwr-clientapp is not installed beside {tmp_path}/python: pip install flwr\n"


def test_what_the_helper_imports_is_there() -> None:
    for module in warm_node._PRELOADED:
        importlib.import_module(module)
    assert callable(importlib.import_module("flwr.supernode.cli").flwr_clientapp)
