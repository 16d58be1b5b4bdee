"""kill -9 of every process of a deployment, each alone, and a site that is paused: ``make test-deployment``.

The run finishes, and every ledger says what was released: no more and no less.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.deployment.running import Running, deployment, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROUNDS = 4
# Enough steps that a round can be struck in its middle.
LONG = {"rounds": ROUNDS, "steps_per_round": 1500, "physical_batch_size": 512, "noise_multiplier": 60.0}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with long_rounds(tmp_path, round_deadline=300.0) as running:
        yield running


def long_rounds(folder: Path, **changes: float) -> AbstractContextManager[Running]:
    return deployment(folder, limits={"epsilon": "1000.0"}, epsilon=1000.0, **{**LONG, **changes})


def strike_in_round_2(running: Running, strike: Callable[[], None]) -> None:
    """See a run through, and strike while site 0 trains for round 2."""
    failures: list[BaseException] = []

    def see_through() -> None:
        try:
            running.run("struck")
        except BaseException as error:
            failures.append(error)

    watching = threading.Thread(target=see_through)
    watching.start()

    def in_round_2() -> bool:
        if failures:
            raise failures[0]
        if len(running.events("struck", "round")) < 1:
            return False
        status = running.site(0).status()
        early = 10 < status.progress.steps_done < status.progress.steps / 2  # it goes on for longer than a strike takes
        return status.training and status.round == 2 and early

    wait_until(in_round_2, 300)
    strike()
    watching.join(600)
    assert not watching.is_alive() and not failures, failures


def check(running: Running, tmp_path: Path) -> None:
    """The run is whole: the simulation's model, every round admitted from both sites, one charge and release each."""
    assert [event["admitted"] for event in running.events("struck", "round")] == [2] * ROUNDS
    assert running.model("struck") == running.simulated(tmp_path / "simulated")
    running.processes.close()
    for site in running.files.sites:
        assert running.charged_rounds(site, "struck") == [(number, True) for number in range(1, ROUNDS + 1)]


@pytest.mark.parametrize("name", ["site-1-daemon", "site-1-node", "superlink", "gate", "superexec"])
def test_a_killed_process_is_started_again_and_the_run_is_whole(running: Running, tmp_path: Path, name: str) -> None:
    strike_in_round_2(running, lambda: running.kill(name))
    wait_until(lambda: running.processes.processes[name].starts > 1, 30)
    check(running, tmp_path)


def test_a_killed_server_app_is_submitted_again_and_the_run_is_whole(running: Running, tmp_path: Path) -> None:
    def strike() -> None:
        (pid,) = running.server_apps()
        os.kill(pid, signal.SIGKILL)

    strike_in_round_2(running, strike)
    assert running.events("struck", "resume")
    check(running, tmp_path)


def test_a_killed_server_app_and_superlink_together(running: Running, tmp_path: Path) -> None:
    def strike() -> None:
        (pid,) = running.server_apps()
        os.kill(pid, signal.SIGKILL)
        running.kill("superlink")

    strike_in_round_2(running, strike)
    check(running, tmp_path)


@pytest.mark.parametrize("name", ["site-1-daemon", "site-1-node"])
def test_a_site_paused_in_the_middle_of_its_training_holds_nobody_and_comes_back(tmp_path: Path, name: str) -> None:
    deadline = 60.0
    # The end of round 2 and round 3 must fit into one deadline, also where other work is going on.
    with long_rounds(tmp_path, round_deadline=deadline) as running:

        def pause_over_the_end_of_the_round() -> None:
            process = running.process(name)
            process.send_signal(signal.SIGSTOP)
            try:
                wait_until(lambda: len(running.events("struck", "round")) >= 2, 3 * deadline)
            finally:
                process.send_signal(signal.SIGCONT)

        strike_in_round_2(running, pause_over_the_end_of_the_round)
        rounds = running.events("struck", "round")
        assert [event["admitted"] for event in rounds] == [2, 1, 2, 2]
        assert "no reply within" in rounds[1]["rejections"][0]["reason"]
        assert running.processes.processes[name].starts == 1
        running.processes.close()
        # Nobody waited for its release of round 2; it was made all the same, under one charge.
        for site in running.files.sites:
            assert running.charged_rounds(site, "struck") == [(number, True) for number in range(1, ROUNDS + 1)]


def test_a_run_ends_while_a_site_is_paused(tmp_path: Path) -> None:
    with deployment(tmp_path, rounds=3, round_deadline=40.0) as running:
        daemon = running.process("site-1-daemon")

        def pause_after_round_1() -> None:
            wait_until(lambda: running.events("paused", "round"), 300)
            daemon.send_signal(signal.SIGSTOP)

        striking = threading.Thread(target=pause_after_round_1)
        striking.start()
        running.run("paused")
        striking.join()
        daemon.send_signal(signal.SIGCONT)
        rounds = running.events("paused", "round")
        assert [len(event["rejections"]) for event in rounds][:2] == [0, 1]
        reason = rounds[1]["rejections"][0]["reason"]
        assert "no reply within" in reason or "no site answers" in reason  # the deadline's word, or the shim's
