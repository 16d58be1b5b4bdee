"""A site with a ledger: nothing is released that was not charged, and nothing is charged twice."""

import hashlib
import os
import random
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from client.ledger import Ledger
from client.policy import SitePolicy
from client.randomness import OsRandomness
from client.site import Guard, Site, Workbench
from common.accounting import epsilon_of
from common.charges import Charge
from common.errors import ConfigError, LedgerError, ModelError, ModelMissing, NoRelease, PlanRefused, WireError
from common.models import initial_vector
from common.signing import PlanSigner
from simulations.seeded import SeededRandomness
from tests.support import CLASSES, FEATURES, SMALL_MODEL, site_data, small_dataset, small_request

DATA = small_dataset()
START = initial_vector(SMALL_MODEL, 3)
ROUND = {"sampling_rate": 0.1, "steps": 4, "noise_multiplier": 1.0}


def policy_with(**changes: object) -> SitePolicy:
    limits = {"epsilon": 8.0, "delta": 1e-5, "models": [SMALL_MODEL], "value-codings": ["f32"]}
    return SitePolicy.parse({**limits, **changes})


def site_at(path: Path, policy: SitePolicy | None = None, workbench: Workbench | None = None) -> tuple[Site, Ledger]:
    ledger = Ledger(path) if path.exists() else Ledger.create(path)
    guard = Guard(policy or policy_with(), ledger)
    data = site_data(DATA.train_inputs, DATA.train_targets)
    return Site(data, OsRandomness(), workbench or Workbench("cpu"), guard), ledger


def request(round_number: int = 1, **changes: object) -> tuple[bytes, bytes]:
    return small_request(START, round=round_number, **{**ROUND, **changes})


def test_the_same_round_gives_the_same_bytes_and_is_charged_once(tmp_path: Path) -> None:
    site, ledger = site_at(tmp_path / "ledger")
    first = site.train(*request())
    assert site.train(*request()) == first
    ledger.close()
    site, ledger = site_at(tmp_path / "ledger")  # a restart
    assert site.train(*request()) == first
    assert ledger.history == (Charge(1.0, 0.1, 4),)
    assert site.train(*request(2)) != first
    assert ledger.history == (Charge(1.0, 0.1, 8),)


def test_another_plan_for_the_same_round_is_refused(tmp_path: Path) -> None:
    site, ledger = site_at(tmp_path / "ledger")
    site.train(*request())
    with pytest.raises(PlanRefused, match="under another plan") as refused:
        site.train(*request(learning_rate=0.5))
    assert not refused.value.for_good  # the next round may be fine
    assert ledger.history == (Charge(1.0, 0.1, 4),)


def test_what_is_refused_costs_nothing(tmp_path: Path) -> None:
    site, ledger = site_at(tmp_path / "ledger", policy_with(**{"max-steps-per-round": 4}))
    plan, model = request()
    for bad, error in [
        (request(steps=5), PlanRefused),
        (request(private=False), PlanRefused),
        ((b"junk", model), WireError),
        ((plan, b"junk"), WireError),
        ((plan, small_request(START + 1)[1]), WireError),
        ((plan, _held_elsewhere()), ModelMissing),
        (request(method="importance"), PlanRefused),  # whose reference nobody named
    ]:
        with pytest.raises(error):
            site.train(*bad)
    assert ledger.history == () and not list(ledger.entries())
    site.train(plan, model)
    assert ledger.history == (Charge(1.0, 0.1, 4),)


def _held_elsewhere() -> bytes:
    from common.broadcast import encode_held

    return encode_held("0" * 16)


def test_the_budget_ends_a_run_and_all_runs_share_it(tmp_path: Path) -> None:
    site, ledger = site_at(tmp_path / "ledger", policy_with(epsilon=2.0))
    plans = [request(number, noise_multiplier=2.0, run="a" if number % 2 else "b") for number in range(1, 200)]
    done = 0
    while epsilon_of((*ledger.history, Charge(2.0, 0.1, 4)), 1e-5) <= 2.0:
        site.train(*plans[done])
        done += 1
    assert done > 1 and epsilon_of(ledger.history, 1e-5) <= 2.0
    with pytest.raises(PlanRefused, match="above this site's budget of 2"):
        site.train(*plans[done])
    with pytest.raises(PlanRefused, match="budget"):
        site.train(*request(1, noise_multiplier=2.0, run="c"))
    assert site.train(*request(1, noise_multiplier=2.0, run="a"))  # what was paid for is still given out


def test_only_the_servers_own_plans_are_obeyed(tmp_path: Path) -> None:
    server, other = PlanSigner.create(tmp_path / "key"), PlanSigner.create(tmp_path / "other")
    assert PlanSigner.load(tmp_path / "key").public_key == server.public_key
    site, ledger = site_at(tmp_path / "ledger", policy_with(**{"server-key": server.public_key}))
    plan, model = request()
    for signature in (b"", b"x" * 64, other.sign(plan), server.sign(request(2)[0])):
        with pytest.raises(PlanRefused, match="not signed"):
            site.train(plan, model, signature)
    assert ledger.history == ()
    assert site.train(plan, model, server.sign(plan))
    assert [entry.server for entry in ledger.entries()] == [server.public_key]


def test_a_site_without_a_single_record_charges_and_replies_like_any_other(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger")
    nobody = site_data(DATA.train_inputs[:0], DATA.train_targets[:0], declared_size=240)
    site = Site(nobody, OsRandomness(), Workbench("cpu"), Guard(policy_with(), ledger))
    release = site.train(*request())
    other, _ = site_at(tmp_path / "other")
    assert len(release) == len(other.train(*request()))
    assert ledger.history == (Charge(1.0, 0.1, 4),)


def test_a_site_with_a_ledger_takes_no_seeded_noise(tmp_path: Path) -> None:
    guard = Guard(policy_with(), Ledger.create(tmp_path / "ledger"))
    data = site_data(DATA.train_inputs, DATA.train_targets)
    with pytest.raises(ConfigError, match="operating system, got SeededRandomness"):
        Site(data, SeededRandomness(1, 0), Workbench("cpu"), guard)


class _Centring(torch.nn.Module):
    """Mixes records, so that clipping them one by one protects nobody."""

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs - outputs.mean(0)


def mixing_model() -> torch.nn.Module:
    """Return a model that the self-check refuses."""
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, CLASSES), _Centring())


def test_a_model_that_mixes_records_is_refused_before_the_charge(tmp_path: Path) -> None:
    model = f"{__name__}:mixing_model"
    site, ledger = site_at(tmp_path / "ledger", policy_with(models=[model]))
    start = initial_vector(model, 3)
    with pytest.raises(ModelError, match="depends on the other records"):
        site.train(*small_request(start, model=model, **ROUND))
    assert ledger.history == ()


def test_a_crash_after_the_charge_leaves_a_charge_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import client.site

    site, ledger = site_at(tmp_path / "ledger")

    def crash(*_: object) -> None:
        assert ledger.history == (Charge(1.0, 0.1, 4),)  # before anything is computed from the data
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(client.site, "train_round", crash)
        with pytest.raises(KeyboardInterrupt):
            site.train(*request())
    assert site.train(*request()) == site.train(*request())
    assert ledger.history == (Charge(1.0, 0.1, 4),)


def test_a_failure_after_the_charge_is_logged_at_the_site_told_to_nobody_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a record is in may decide whether a round fails, and how: a server could ask again and again."""
    import client.site

    targets = DATA.train_targets.copy()
    targets[5] = 7  # of 3 classes
    whole_batch = request(sampling_rate=1.0, noise_multiplier=10.0)
    ledger = Ledger.create(tmp_path / "ledger")
    data, guard = site_data(DATA.train_inputs, targets), Guard(policy_with(), ledger)
    site = Site(data, OsRandomness(), Workbench("cpu"), guard)
    trainings = []
    train_round = client.site.train_round
    monkeypatch.setattr(client.site, "train_round", lambda *given: trainings.append(1) or train_round(*given))
    for _ in range(2):
        with pytest.raises(NoRelease) as failed:
            site.train(*whole_batch)
        assert str(failed.value) == str(NoRelease())
    assert len(trainings) == 1 and ledger.history == (Charge(10.0, 1.0, 4),)
    assert caplog.text.count("Target 7 is out of bounds") == 1
    assert len(caplog.messages) == 1 and "run test, round 1 failed after its charge" in caplog.messages[0]
    restarted = Site(data, OsRandomness(), Workbench("cpu"), guard)
    with pytest.raises(NoRelease):
        restarted.train(*whole_batch)
    assert len(trainings) == 2 and ledger.history == (Charge(10.0, 1.0, 4),)


def test_a_release_that_cannot_be_kept_is_not_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, ledger = site_at(tmp_path / "ledger")

    def full(*_: object) -> None:
        raise LedgerError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "keep", full)
        with pytest.raises(NoRelease):
            site.train(*request())
    with pytest.raises(NoRelease):
        site.train(*request())
    assert ledger.history == (Charge(1.0, 0.1, 4),)
    assert site.train(*request(2))


def run_until_killed(path: Path, workbench: Workbench, out: int) -> None:
    """Carry out round after round; tell the digest of each release only once the site has handed it out."""
    torch.set_num_threads(1)  # the others of its parent are not in a fork
    site, ledger = site_at(path, workbench=workbench)
    number = max(1, sum(1 for _ in ledger.entries()))  # the last one may have been cut off: ask for it again
    os.write(out, b"ready\n")
    while True:
        release = site.train(*request(number, noise_multiplier=50.0))
        os.write(out, f"{number} {hashlib.sha256(release).hexdigest()}\n".encode())
        number += 1


def _seconds_of_a_round(path: Path, workbench: Workbench) -> float:
    site, ledger = site_at(path, workbench=workbench)
    site.train(*request(1))
    start = time.monotonic()
    for number in range(2, 7):
        site.train(*request(number, noise_multiplier=50.0))
    ledger.close()
    return (time.monotonic() - start) / 5


def test_killed_at_any_point_a_site_has_charged_what_it_released(tmp_path: Path) -> None:
    # One workbench, whose model is checked: then kills fall into rounds, and not into what is done before the first.
    path, draw, workbench = tmp_path / "ledger", random.Random(5), Workbench("cpu")
    Ledger.create(path).close()
    round_seconds = _seconds_of_a_round(tmp_path / "other", workbench)
    released: dict[int, str] = {}
    for _ in range(200):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run_until_killed(path, workbench, write)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as told:
            assert told.readline() == "ready\n"
            seen = [told.readline() for _ in range(draw.randrange(3))]  # however busy the machine is, rounds are done
            time.sleep(draw.uniform(0.0, round_seconds))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL
            for line in [*seen, *told.read().splitlines()]:
                number, digest = line.split()
                # Asked again, the same bytes: never a second draw.
                assert released.setdefault(int(number), digest) == digest
        ledger = Ledger(path)
        charged = {entry.round for entry in ledger.entries()}
        ledger.close()
        assert released.keys() <= charged
        assert len(charged) <= len(released) + 1
    assert len(released) > 50  # or nothing much was killed


def test_with_a_full_disk_nothing_is_released(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    site, ledger = site_at(path)
    site.train(*request())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # a limit on the size of files stands for the end of the disk, in a process of its own
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
            try:
                site.train(*request(2))
                os.write(write, b"released")
            except LedgerError:
                os.write(write, b"refused")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        assert told.read() == "refused"
    os.waitpid(child, 0)
    ledger.close()
    site, ledger = site_at(path)
    assert len(list(ledger.entries())) == 1
    site.train(*request(2))


def test_noise_of_a_guarded_site_is_fresh_in_every_round_and_restart(tmp_path: Path) -> None:
    from common.coding import decode

    def values(path: Path, number: int) -> np.ndarray:
        site, ledger = site_at(path)
        data = site.train(*request(number, noise_multiplier=100.0, mask_kept=START.size))
        ledger.close()
        return decode(data, size=START.size, max_kept=START.size, value_coding="f32").values

    draws = [values(tmp_path / name, number) for name in "ab" for number in (1, 2)]
    assert np.abs(np.corrcoef(draws)[np.triu_indices(4, 1)]).max() < 5 / np.sqrt(START.size)
