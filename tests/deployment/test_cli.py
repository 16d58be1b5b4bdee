"""``fedsieve deploy`` before a SuperLink that says what the test makes it say: exit codes, messages, what is asked."""

import argparse
import io
import sys
from pathlib import Path

import pytest
from flwr.common.serde import user_config_from_proto
from flwr.proto.control_pb2 import StartRunRequest, StreamLogsRequest
from flwr.proto.node_pb2 import NodeInfo

from deployment import cli, superlink
from deployment.keys import ServerKeys, SiteKeys
from simulations.cli import main
from tests.deployment.servers import FakeLink, a_run

COMPLETED = ("finished", "completed", "")


@pytest.fixture(autouse=True)
def _at_the_link(fake: FakeLink, keys: ServerKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_SUPERLINK", fake.address)
    monkeypatch.setenv("FEDSIEVE_CA", str(keys.ca))
    monkeypatch.setattr(superlink, "build_fab_from_disk", lambda app: f"bundle of {app}".encode())


def submitted(fake: FakeLink) -> list[tuple[bytes, dict[str, object]]]:
    asked = [one for one in fake.asked if isinstance(one, StartRunRequest)]
    return [(one.fab.content, user_config_from_proto(one.override_config)) for one in asked]


def followed(fake: FakeLink) -> list[int]:
    return [one.run_id for one in fake.asked if isinstance(one, StreamLogsRequest)]


def test_a_run_is_submitted_and_seen_through_with_its_log(fake: FakeLink, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fates, fake.log = [[COMPLETED]], ["accuracy 0.9\n"]
    assert main(["deploy", "run", "--name", "first", "--set", "rounds=3", "--set", "epsilon=2"]) == 0
    assert capsys.readouterr().out == "run 1 submitted\nrun 1 completed\naccuracy 0.9\n"
    project = Path(cli.__file__).parents[1]
    assert submitted(fake) == [(f"bundle of {project}".encode(), {"rounds": 3, "epsilon": 2.0, "name": "first"})]
    assert followed(fake) == [1]


def test_a_run_goes_on_and_need_not_be_watched(fake: FakeLink, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "run", "--set", "name=second", "--resume", "--detach"]) == 0
    assert capsys.readouterr().out == "run 1 submitted\n"
    assert submitted(fake)[0][1] == {"name": "second", "resume": True}
    assert not followed(fake)


def test_another_checkout_is_run_with_its_own_defaults(fake: FakeLink, tmp_path: Path) -> None:
    ours = (Path(cli.__file__).parents[1] / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(ours.replace('method = "random"', 'method = "no such method"'))
    assert main(["deploy", "run", "--name", "n", "--app", str(tmp_path), "--detach"]) == 2
    assert not fake.asked
    (tmp_path / "pyproject.toml").write_text(ours)
    assert main(["deploy", "run", "--name", "n", "--app", str(tmp_path), "--detach"]) == 0
    assert submitted(fake)[0][0] == f"bundle of {tmp_path}".encode()


def test_a_run_that_fails_is_an_error(fake: FakeLink, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fates = [[("finished", "failed", "ServerApp failed with exception: X")]]
    assert main(["deploy", "run", "--name", "first"]) == 2
    assert "fedsieve: run 1 failed: ServerApp failed with exception: X" in capsys.readouterr().err


def test_logs_are_of_the_run_that_is_named_or_of_the_latest(fake: FakeLink, capsys: pytest.CaptureFixture[str]) -> None:
    fake.log = ["one\n", "two\n"]
    fake.runs = {5: a_run(5, pending_at="2026-01-02T00:00:00+00:00"), 9: a_run(9)}
    assert main(["deploy", "logs"]) == 0
    assert main(["deploy", "logs", "9"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n" * 2
    assert followed(fake) == [5, 9]


def test_logs_without_any_run_are_an_error(fake: FakeLink, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "logs"]) == 2
    assert f"there are no runs at {fake.address} yet: 'fedsieve deploy run' starts one" in capsys.readouterr().err
    assert not followed(fake)


def test_the_status_is_that_of_nodes_and_runs(fake: FakeLink, capsys: pytest.CaptureFixture[str]) -> None:
    fake.nodes = [NodeInfo(node_id=3, name="site-1", status="online"), NodeInfo(node_id=4, status="registered")]
    fake.runs = {
        5: a_run(5, "running", details="not over", bytes_sent=1, bytes_recv=2),
        9: a_run(9, "finished", "failed", "why", pending_at="2026-01-02T03:04:05+00:00", bytes_sent=3, bytes_recv=4),
    }
    assert main(["deploy", "status"]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        f"2 nodes at {fake.address}",
        "  -                    registered   4",
        "  site-1               online       3",
        "2 runs, with the bytes of the SuperLink's own counters",
        "  9                    failed       2026-01-02 03:04 3 to sites, 4 from sites why",
        "  5                    running      2026-01-01 00:00 1 to sites, 2 from sites",
    ]


def test_nodes_are_let_in_and_out_and_runs_are_stopped(
    fake: FakeLink, keys: ServerKeys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = SiteKeys.create(tmp_path / "site-1", keys.ca, (), 1)
    assert main(["deploy", "register", str(site.public)]) == 0
    assert main(["deploy", "register", str(site.public), "--name", "hospital"]) == 0
    assert main(["deploy", "unregister", "77"]) == 0
    assert main(["deploy", "stop", "5"]) == 0
    first, second, third, fourth = fake.asked
    assert (first.name, second.name, third.node_id, fourth.run_id) == ("site-1", "hospital", 77, 5)
    assert capsys.readouterr().out.splitlines() == [
        "registered node 77",
        "registered node 77",
        "node 77 is let in no more",
        "run 5 stopped; 'fedsieve deploy run --resume --name NAME' goes on",
    ]


def test_what_is_told_is_told_at_once(fake: FakeLink, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Pipe(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    fake.fates, fake.log, fake.runs = [[COMPLETED]], ["one\n", "two\n"], {}
    monkeypatch.setattr(sys, "stdout", Pipe())
    assert main(["deploy", "run", "--name", "first"]) == 0
    assert seen == ["run 1 submitted\n"]
    seen.clear()
    monkeypatch.setattr(sys, "stdout", Pipe())
    assert main(["deploy", "logs"]) == 0
    assert seen == ["one\n", "one\ntwo\n"]


def test_the_superlink_is_the_one_that_is_named(
    fake: FakeLink, keys: ServerKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(*words: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        cli.add_deploy(parser.add_subparsers())
        return parser.parse_args(["deploy", "status", *words])

    assert parsed("--superlink", "there:1", "--ca", "file").superlink == "there:1"
    assert (parsed().superlink, str(parsed().ca)) == (fake.address, str(keys.ca))
    monkeypatch.delenv("FEDSIEVE_SUPERLINK")
    monkeypatch.delenv("FEDSIEVE_CA")
    assert (parsed().superlink, parsed().ca) == ("127.0.0.1:8000", None)
    assert main(["deploy", "status", "--superlink", fake.address, "--ca", str(keys.ca)]) == 0


@pytest.mark.parametrize(
    ("command", "missing"),
    [(["deploy"], "COMMAND"), (["keys"], "COMMAND"), (["keys", "add-site", "site-1"], "--server")],
)
def test_an_incomplete_command_says_what_is_missing(
    command: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert f"required: {missing}" in capsys.readouterr().err
