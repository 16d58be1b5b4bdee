import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from common.errors import ConfigError, NothingLearned
from server.app import run
from server.runlog import Event, read_events
from simulations.ray_grid import RayGrid, _resources, assign, start_ray
from simulations.run import Engine, simulate
from tests.support import small_config, small_dataset


def test_work_is_given_out_longest_first() -> None:
    assert assign([5, 1, 9, 3, 3], 2) == [[2, 1], [0, 3, 4]]
    assert assign([1], 3) == [[0], [], []]
    shares = assign(list(range(100)), 4)
    loads = [sum(share) for share in shares]
    assert max(loads) - min(loads) <= 4
    assert sorted(item for share in shares for item in share) == list(range(100))


@pytest.mark.parametrize(
    ("actors", "gpus", "cluster", "expected"),
    [
        (0, 0.0, {"CPU": 8.0}, (5, 1.0)),
        (0, 0.0, {"CPU": 2.9}, (2, 1.0)),
        (0, 0.0, {"CPU": 0.5}, (1, 0.5)),
        (0, 0.0, {}, (1, 1.0)),
        (4, 0.0, {"CPU": 2.0}, (4, 0.5)),
        (2, 0.5, {"CPU": 8.0, "GPU": 1.0}, (2, 1.0)),
    ],
)
def test_actors_share_the_cpus_and_gpus_that_there_are(
    actors: int, gpus: float, cluster: dict[str, float], expected: tuple[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: cluster)
    found = _resources(actors, 5, gpus)
    assert (found.actors, found.cpus, found.gpus) == (*expected, gpus)
    if gpus:
        with pytest.raises(ConfigError, match=r"3 actors with 0.5 GPUs each need more than the 1 GPUs"):
            _resources(3, 5, gpus)
        monkeypatch.setattr(ray, "cluster_resources", dict)
        with pytest.raises(ConfigError, match=r"1 actors with 0.5 GPUs each need more than the 0 GPUs"):
            _resources(1, 5, gpus)


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
    with pytest.raises(NothingLearned, match="The first rejection: round 1, site 0: the site failed: the actor died 3"):
        simulate(config, Engine(actors=1))
    (folder,) = tmp_path.iterdir()
    assert rejections(folder) == ["the site failed: the actor died 3 times while this site was waiting for it"] * 6


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


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for Ray in which nothing is noted yet; and one try of ray.init at a dead address instead of twenty."""
    monkeypatch.setattr("ray._private.ray_constants.NUM_REDIS_GET_RETRIES", 1)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder, "ray")
        ray.shutdown()


@pytest.fixture
def cluster(ray_folder: Path) -> Iterator[Cluster]:
    """A head that runs, and is noted as the last one of this machine."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    assert (ray_folder / "ray_current_cluster").read_text() == cluster.address
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def joined(address: str | None) -> str:
    """Return the address of the Ray that ``start_ray`` gives us, after having left it."""
    assert start_ray(address)
    try:
        assert not start_ray(address), "this process has one already"
        return str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


def test_two_raylets(tmp_path: Path, cluster: Cluster) -> None:
    cluster.add_node(num_cpus=1)
    config = small_config(tmp_path)
    grid = RayGrid(config, small_dataset(), actors=2, ray_address=cluster.address)
    try:
        assert len(set(grid.actor_nodes)) == 2
        spread = run(grid, config)
    finally:
        grid.close()
    assert spread.model.tobytes() == simulate(config, Engine(in_process=True)).model.tobytes()


@pytest.mark.parametrize(
    ("option", "environment", "asked"),
    [
        (None, None, None),
        (None, "local", None),
        ("local", "a:1", None),
        ("a:1", None, ("a:1", "--ray-address")),
        (None, "a:1", ("a:1", "RAY_ADDRESS")),
        ("a:1", "b:2", ("a:1", "--ray-address")),
    ],
)
def test_a_cluster_is_looked_for_only_where_one_is_asked_for(
    option: str | None, environment: str | None, asked: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, started = [], []
    monkeypatch.setattr("simulations.ray_grid._cluster_at", lambda *asked: looked.append(asked) or "found:1")
    monkeypatch.setattr(ray, "init", lambda address, **options: started.append((address, options)))
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert start_ray(option)
    assert looked == [asked] * (asked is not None)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    assert started == [("found:1" if asked else "local", quiet)]


@pytest.mark.parametrize(("slow", "tries"), [(0, 1), (2, 3), (3, 3)])
def test_ray_is_given_three_times_its_30_seconds(slow: int, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def init(address: str, **options: object) -> None:
        tried.append(address)
        if len(tried) <= slow:
            raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    if slow < 3:
        assert start_ray(None)
    else:
        with pytest.raises(RuntimeError, match="timed out"):
            start_ray(None)
    assert len(tried) == tries


def test_what_else_goes_wrong_with_ray_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def init(address: str, **options: object) -> None:
        tried.append(address)
        raise PermissionError("no room")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(PermissionError, match="no room"):
        start_ray(None)
    assert len(tried) == 1


DEAD = "127.0.0.1:1"  # a port that nothing listens at


def test_a_cluster_is_joined_where_one_is_asked_for(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert joined(None) != cluster.address, "noted by Ray, asked for by nobody"
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    assert joined(None) == cluster.address
    assert joined("local") != cluster.address
    monkeypatch.setenv("RAY_ADDRESS", DEAD)
    assert joined("auto") == cluster.address
    where: list[str] = []
    simulate(
        small_config(tmp_path, rounds=1),
        Engine(actors=1, ray_address=cluster.address),
        (lambda event: where.append(ray.get_runtime_context().gcs_address),),
    )
    assert set(where) == {cluster.address}


def test_a_note_of_a_dead_cluster_is_not_followed_and_two_runs_at_once_have_a_ray_each(ray_folder: Path) -> None:
    ray_folder.mkdir()
    (ray_folder / "ray_current_cluster").write_text(DEAD)
    assert start_ray(None)
    other = "from tests.simulations.test_ray_grid import joined; print(joined(None))"
    ended = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-1] != ray.get_runtime_context().gcs_address
    assert ray.get(ray.remote(assign).remote([1], 1)) == [[0]], "ours goes on"


# Not 'auto': it finds whatever Ray runs on this machine, such as that of another test process.
@pytest.mark.parametrize("address", [DEAD, "deaf", "nowhere", "ray://127.0.0.1:10001"])
@pytest.mark.parametrize("source", ["--ray-address", "RAY_ADDRESS"])
def test_a_cluster_that_does_not_answer_is_an_error_that_names_it(
    address: str, source: str, ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulations.ray_grid.ANSWER_WITHIN", 1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        if address == "deaf":
            address = f"127.0.0.1:{deaf.getsockname()[1]}"
        if source == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"^{source}={address} names no Ray cluster.* leave out {source}"):
            start_ray(address if source == "--ray-address" else None)
    assert not ray.is_initialized()


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
