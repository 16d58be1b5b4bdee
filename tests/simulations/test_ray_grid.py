import os
import threading
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from common.errors import ConfigError
from server.app import run
from server.runlog import Event, read_events
from simulations.ray_grid import RayGrid, assign
from simulations.run import Engine, simulate
from tests.support import small_config, small_dataset


def test_work_is_given_out_longest_first() -> None:
    assert assign([5, 1, 9, 3, 3], 2) == [[2, 1], [0, 3, 4]]
    assert assign([1], 3) == [[0], [], []]
    shares = assign(list(range(100)), 4)
    loads = [sum(share) for share in shares]
    assert max(loads) - min(loads) <= 4
    assert sorted(item for share in shares for item in share) == list(range(100))


def rejections(folder: Path) -> list[str]:
    return [r["reason"] for e in read_events(folder / "run.jsonl") if e["event"] == "round" for r in e["rejections"]]


def in_an_actor() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


@pytest.mark.timeout(900)  # four actors are started, each importing torch: slow on a machine with other work
def test_an_actor_that_dies_is_replaced_and_its_work_repeated(tmp_path: Path) -> None:
    config = small_config(tmp_path, rounds=3, steps_per_round=60)
    undisturbed = simulate(config, Engine(in_process=True))
    grid = RayGrid(config, small_dataset(), actors=2)
    first_actors = list(grid._actors)
    try:

        def kill(event: Event) -> None:
            if event["event"] == "round" and event["round"] == 1:
                ray.kill(grid._actors[0])  # before the next round
                threading.Timer(0.2, lambda: ray.kill(grid._actors[1])).start()  # in the middle of it

        disturbed = run(grid, config, (kill,))
        assert all(old is not new for old, new in zip(first_actors, grid._actors, strict=True))
    finally:
        grid.close()
    assert disturbed.model.tobytes() == undisturbed.model.tobytes()
    assert rejections(disturbed.folder) == []


def test_a_site_that_always_kills_its_actor_is_rejected_and_the_run_goes_on(tmp_path: Path) -> None:
    config = small_config(tmp_path, rounds=1, model="tests.simulations.test_ray_grid:deadly_model", evaluate_every=0)
    result = simulate(config, Engine(actors=1))
    assert (
        rejections(result.folder) == ["the site failed: the actor died 3 times while this site was waiting for it"] * 6
    )


def deadly_model() -> object:
    """Return a model; in an actor, end the process instead."""
    from common.models import build
    from tests.support import SMALL_MODEL

    if in_an_actor():
        os._exit(1)
    return build(SMALL_MODEL)


def test_a_site_that_raises_is_a_rejected_reply(tmp_path: Path) -> None:
    config = small_config(tmp_path, rounds=2, sampling_rate=1.0, dataset="tests.support:dataset_with_bad_record")
    result = simulate(config, Engine(actors=2))
    reasons = rejections(result.folder)
    assert len(reasons) == 2  # the one site that has the record, in each round
    assert all(reason.startswith("the site failed: ") for reason in reasons)
    rounds = [event for event in read_events(result.folder / "run.jsonl") if event["event"] == "round"]
    assert [event["admitted"] for event in rounds] == [5, 5]


def test_two_raylets(tmp_path: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    config = small_config(tmp_path)
    try:
        grid = RayGrid(config, small_dataset(), actors=2, ray_address=cluster.address)
        try:
            assert len(set(grid.actor_nodes)) == 2
            spread = run(grid, config)
        finally:
            grid.close()
    finally:
        cluster.shutdown()
    assert spread.model.tobytes() == simulate(config, Engine(in_process=True)).model.tobytes()


def test_a_deadline_ends_the_round_and_the_next_one_finds_free_actors(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        rounds=2,
        sites=2,
        round_deadline=20.0,
        model="tests.simulations.test_ray_grid:model_that_sleeps_once",
        evaluate_every=0,
        min_cohort=2,
    )
    flag = Path(os.environ["FEDSIEVE_TEST_FLAG"])
    flag.touch()
    result = simulate(config, Engine(actors=1))
    rounds = [event for event in read_events(result.folder / "run.jsonl") if event["event"] == "round"]
    assert [event["abandoned"] for event in rounds] == [True, False]
    assert "no reply within 20 s" in rounds[0]["rejections"][0]["reason"]
    assert not flag.exists()


@pytest.fixture(autouse=True)
def test_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_TEST_FLAG", str(tmp_path / "flag"))


def model_that_sleeps_once() -> object:
    """Return a model; in the first actor that asks, take far too long over it."""
    from common.models import build
    from tests.support import SMALL_MODEL

    flag = Path(os.environ["FEDSIEVE_TEST_FLAG"])
    if flag.exists() and in_an_actor():
        flag.unlink()
        time.sleep(300)
    return build(SMALL_MODEL)


def test_more_gpus_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lower --actors or --gpus-per-actor"):
        simulate(small_config(tmp_path), Engine(actors=1, gpus_per_actor=1000))
    assert not ray.is_initialized()
