"""``restart``: a run that is submitted again goes on, or begins where the first attempt made no checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError, RunFolderError
from server.runlog import Event, read_events
from simulations.run import Engine, simulate
from tests.support import small_config

ENGINE = Engine(in_process=True)


def test_it_begins_where_there_is_no_checkpoint_and_goes_on_where_there_is_one(tmp_path: Path) -> None:
    config = small_config(tmp_path, name="x", restart=True)
    (tmp_path / "x").mkdir()  # left by an attempt that was killed before anybody was asked
    (tmp_path / "x" / "run.jsonl").write_text('{"event":"run"}\n')
    begun = simulate(config, ENGINE)
    assert [event["event"] for event in read_events(begun.folder / "run.jsonl")] == ["run", *["round"] * 4, "end"]
    again = simulate(config, ENGINE)
    events = [event["event"] for event in read_events(again.folder / "run.jsonl")]
    assert events == ["run", *["round"] * 4, "resume", "end"]
    assert again.model.tobytes() == begun.model.tobytes() and again.uplink_bytes == begun.uplink_bytes


def test_a_new_run_never_goes_on_by_itself(tmp_path: Path) -> None:
    config = small_config(tmp_path, name="x")
    simulate(config, ENGINE)
    with pytest.raises(RunFolderError, match="exists already"):
        simulate(config, ENGINE)
    with pytest.raises(RunFolderError, match="begun with another config"):
        simulate(replace(config, restart=True, seed=9), ENGINE)
    with pytest.raises(ConfigError, match="a name where restart=true"):
        small_config(tmp_path, restart=True)


def test_a_restarted_run_comes_to_the_same_model_with_a_method_that_remembers(tmp_path: Path) -> None:
    def stop_after_round_2(event: Event) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    whole = simulate(
        small_config(tmp_path / "whole", name="x", method="importance", warmup_epochs=1, first_density=0.2), ENGINE
    )
    config = small_config(tmp_path / "stopped", name="x", method="importance", warmup_epochs=1, first_density=0.2)
    with pytest.raises(KeyboardInterrupt):
        simulate(config, ENGINE, (stop_after_round_2,))
    assert simulate(replace(config, restart=True), ENGINE).model.tobytes() == whole.model.tobytes()
