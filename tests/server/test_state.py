"""Checkpoint, run folder, run log, privacy account and traffic: what survives a restart."""

from pathlib import Path

import numpy as np
import pytest

from common.accounting import epsilon_of
from common.charges import Charge
from common.coding import PartBytes
from common.errors import RunFolderError
from server.checkpoint import Checkpoint
from server.privacy import PrivacyAccount
from server.runfolder import RunFolder
from server.runlog import Event, RunLog, read_events
from server.traffic import Traffic
from tests.support import small_config


def checkpoint() -> Checkpoint:
    return Checkpoint(
        run_id="abc",
        model=np.arange(5, dtype=np.float32),
        rounds_done=3,
        model_version=2,
        log_position=77,
        seconds=1.5,
        optimizer={"velocity": np.ones(5, np.float32)},
        privacy={"0": [[1.0, 0.1, 30]]},
        traffic={},
        counts={"0": [3, 0]},
    )


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    checkpoint().save(path)
    again = Checkpoint.load(path)
    assert again.model.tolist() == [0, 1, 2, 3, 4] and again.optimizer["velocity"].tolist() == [1] * 5
    assert (again.rounds_done, again.model_version, again.log_position, again.seconds) == (3, 2, 77, 1.5)
    assert (again.privacy, again.counts) == ({"0": [[1.0, 0.1, 30]]}, {"0": [3, 0]})
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.npz"]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.npz"
    checkpoint().save(path)
    before = path.read_bytes()

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        checkpoint().save(path)
    assert path.read_bytes() == before


def test_damaged_and_missing_checkpoints_are_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    with pytest.raises(RunFolderError, match="no checkpoint at"):
        Checkpoint.load(path)
    checkpoint().save(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunFolderError, match="cannot read the checkpoint"):
        Checkpoint.load(path)


def test_where_nobody_was_charged_epsilon_is_nothing() -> None:
    account = PrivacyAccount(1e-5, "rdp")
    assert account.largest_epsilon() == 0 and account.epsilon(3) == 0 and account.epsilons() == {}
    account.charge(3, Charge(2.0, 0.1, 10))
    assert account.largest_epsilon() == account.epsilon(3) == epsilon_of([Charge(2.0, 0.1, 10)], 1e-5)
    assert account.epsilon(4) == 0


def test_a_made_up_name_gets_a_number_and_a_given_one_does_not(tmp_path: Path) -> None:
    made_up = small_config(tmp_path)
    first, second = RunFolder.create(made_up), RunFolder.create(made_up)
    assert second.name == f"{first.name}-2"
    named = small_config(tmp_path, name="mine")
    RunFolder.create(named)
    with pytest.raises(RunFolderError, match="exists already"):
        RunFolder.create(named)


def test_a_run_is_resumed_with_its_own_config_alone(tmp_path: Path) -> None:
    RunFolder.create(small_config(tmp_path, name="mine", epsilon=3.0))
    assert RunFolder.resume(small_config(tmp_path, name="mine", epsilon=3.0, device="cpu")).name == "mine"
    with pytest.raises(RunFolderError, match=r"epsilon=3.0 then, 4.0 now"):
        RunFolder.resume(small_config(tmp_path, name="mine", epsilon=4.0))
    with pytest.raises(RunFolderError, match="no run at"):
        RunFolder.resume(small_config(tmp_path, name="other"))
    with pytest.raises(RunFolderError, match="by its name"):
        RunFolder.resume(small_config(tmp_path))


def test_the_log_is_read_back_and_rewound(tmp_path: Path) -> None:
    path, heard = tmp_path / "run.jsonl", list[Event]()
    log = RunLog(path, (heard.append,))
    log.write("run", name="x")
    position = log.position()
    log.write("round", round=1)
    log.rewind(position)
    log.write("round", round=1, again=True)
    log.close()
    assert [e.get("again") for e in read_events(path)] == [None, True]
    assert len(heard) == 3
    with path.open("a") as file:
        file.write('{"event": "rou')  # a server killed while writing
    assert len(list(read_events(path))) == 2


def test_a_log_shorter_than_its_checkpoint_is_not_continued(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.jsonl")
    with pytest.raises(RunFolderError, match="has 0 bytes but the checkpoint was made at 10"):
        log.rewind(10)
    with pytest.raises(RunFolderError, match="has 0 bytes but the checkpoint was made at 1"):
        log.rewind(1)


def test_a_log_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("hello\n")
    with pytest.raises(RunFolderError, match="line 1: not JSON"):
        list(read_events(path))
    path.write_text("[1]\n")
    with pytest.raises(RunFolderError, match="the key 'event'"):
        list(read_events(path))


def test_privacy_adds_up_per_site_and_survives() -> None:
    account = PrivacyAccount(1e-5, "rdp")
    for _ in range(3):
        account.charge(0, Charge(1.0, 0.1, 10))
    account.charge(1, Charge(1.0, 0.1, 10))
    assert account.epsilon(0) == epsilon_of([Charge(1.0, 0.1, 30)], 1e-5) == account.largest_epsilon()
    assert account.epsilon(1) == epsilon_of([Charge(1.0, 0.1, 10)], 1e-5)
    assert account.epsilon(2) == 0
    again = PrivacyAccount(1e-5, "rdp")
    again.restore(account.to_json())
    assert again == account


def test_traffic_adds_up_and_survives() -> None:
    traffic = Traffic(size=1000)
    traffic.begin_round()
    traffic.sent(3, PartBytes(values=4000, header=100, framing=500))
    traffic.received(3, PartBytes(values=1000, header=40, framing=500))
    traffic.begin_round()
    traffic.received(4, PartBytes(index=7, values=500))
    assert traffic.uplink.parts == PartBytes(7, 1500, 40, 500)
    assert traffic.round_uplink.parts == PartBytes(index=7, values=500)
    assert traffic.uplink.dense == 8000 and traffic.downlink.dense == 4000
    assert traffic.uplink_saving == pytest.approx(8000 / 2047)
    assert traffic.total_saving == pytest.approx(12000 / (2047 + 4600))
    assert (traffic.sites[3].uplink.total, traffic.sites[3].downlink.total) == (1540, 4600)
    assert traffic.round_sites.keys() == {4}
    again = Traffic.from_json(1000, traffic.to_json())
    assert (again.uplink, again.downlink, again.sites) == (traffic.uplink, traffic.downlink, traffic.sites)


def test_made_up_names_are_counted_on_in_folders_that_are_made(tmp_path: Path) -> None:
    config = small_config(tmp_path / "not" / "there")
    folders = [RunFolder.create(config) for _ in range(3)]
    assert [folder.name for folder in folders] == [config.run_name, f"{config.run_name}-2", f"{config.run_name}-3"]
    assert folders[2].read_config() == config.to_mapping()
    folders[2].config.write_text("epsilon == 3\n")
    with pytest.raises(RunFolderError, match="cannot read"):
        folders[2].read_config()


def test_a_run_that_asked_nobody_yet_is_begun_again_where_it_was(tmp_path: Path) -> None:
    config = small_config(tmp_path, name="mine", restart=True)
    folder = RunFolder.create(config)
    folder.log.write_text("a line of the first attempt\n")
    assert RunFolder.create(config) == folder and not folder.log.exists()
    assert RunFolder.create(config) == folder  # also where there is no log
    assert not RunFolder.has_begun(config)
    checkpoint().save(folder.checkpoint)
    assert RunFolder.has_begun(config)


def test_a_log_is_on_the_disk_at_every_position_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "not" / "there" / "run.jsonl"
    log = RunLog(path)
    RunLog(path).close()  # the folder is there by now
    log.write("run", name="x")
    assert len(list(read_events(path))) == 1
    position = log.position()
    assert position == path.stat().st_size
    log.rewind(position)
    log.write("round", round=1)
    log.rewind(position)
    assert log.position() == position == path.stat().st_size

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        log.position()
    log.close()
    with pytest.raises(ValueError, match="closed file"):
        log.write("end")
    path.write_text('{"a": 1}\n')
    with pytest.raises(RunFolderError, match="line 1: expected an object with the key 'event'"):
        list(read_events(path))


def test_a_checkpoint_with_objects_in_it_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    checkpoint().save(path)
    with np.load(path) as arrays:
        np.savez(path, **{**arrays, "model": np.array([print], dtype=object)})
    with pytest.raises(RunFolderError, match="cannot read the checkpoint"):
        Checkpoint.load(path)
