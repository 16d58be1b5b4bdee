"""Whole simulations: what they compute does not depend on where they run, or on being interrupted."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from common.config import RunConfig
from common.errors import ConfigError, DatasetError, ModelError, NothingLearned, RunFolderError
from server.app import RunResult
from server.runlog import Event, read_events
from simulations import sites
from simulations.ray_grid import start_ray
from simulations.run import Engine, config_of_run, simulate
from tests.support import small_config, small_dataset

IN_PROCESS = Engine(in_process=True)


def run_here(config: RunConfig, *listeners: Any) -> RunResult:
    return simulate(config, IN_PROCESS, listeners)


def events_of(result: RunResult, kind: str) -> list[Event]:
    return [event for event in read_events(result.folder / "run.jsonl") if event["event"] == kind]


def test_the_same_seed_gives_the_same_bytes_whatever_the_number_of_actors(tmp_path: Path) -> None:
    config = small_config(tmp_path, cohort=5, client_momentum=0.5)
    assert start_ray(None)  # one for both
    try:
        models = [simulate(config, engine).model for engine in (IN_PROCESS, Engine(actors=1), Engine(actors=3))]
    finally:
        ray.shutdown()
    assert models[0].tobytes() == models[1].tobytes() == models[2].tobytes()
    other = run_here(small_config(tmp_path, cohort=5, client_momentum=0.5, seed=2)).model
    assert other.tobytes() != models[0].tobytes()


def test_what_is_said_of_the_engine_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        pass

    def open_grid(config: RunConfig, dataset: object, **options: object) -> None:
        raise AskedError(options)

    monkeypatch.setattr("simulations.ray_grid.RayGrid", open_grid)
    monkeypatch.setenv("RAY_ADDRESS", "b:2")
    with pytest.raises(AskedError) as asked:
        simulate(small_config(tmp_path), Engine(actors=3, gpus_per_actor=0.5, ray_address="a:1"))
    assert asked.value.args == ({"actors": 3, "gpus_per_actor": 0.5, "ray_address": "a:1"},)


def test_it_learns_and_says_what_it_cost(tmp_path: Path) -> None:
    result = run_here(small_config(tmp_path, rounds=10, epsilon=50.0, final_density=0.5))
    assert result.accuracy is not None and result.accuracy > 0.8
    assert result.epsilon is not None and 49 < result.epsilon <= 50
    (start,), (end,) = events_of(result, "run"), events_of(result, "end")
    rounds = events_of(result, "round")
    assert [event["round"] for event in rounds] == list(range(1, 11))
    assert start["initial_accuracy"] < result.accuracy
    assert start["seeded_noise"] is True and start["declared_sizes"] == [[site, 40] for site in range(6)]
    for part in ("index", "values", "header", "framing"):
        assert sum(event["uplink"][part] for event in rounds) == end["uplink"][part]
        assert sum(event["downlink"][part] for event in rounds) == end["downlink"][part]
    for event in rounds:  # [site, the four parts of the uplink, those of the downlink]
        assert [row[0] for row in event["sites"]] == event["cohort"]
        for place, part in enumerate(("index", "values", "header", "framing"), start=1):
            assert sum(row[place] for row in event["sites"]) == event["uplink"][part]
            assert sum(row[place + 4] for row in event["sites"]) == event["downlink"][part]
        assert event["bits_per_value"] == pytest.approx(8 * event["uplink"]["values"] / event["kept"] / 6, abs=1e-4)
        assert start["grid_entropy_bits"] < event["bits_per_value"]
        assert event["bits_per_parameter"] == pytest.approx(8 * sum(event["uplink"].values()) / 131 / 6, abs=1e-4)
    assert result.uplink_bytes == sum(end["uplink"].values()) == sum(row["uplink"] for row in end["sites"])
    assert end["dense_uplink"] == 4 * start["parameters"] * 60
    epsilons = [event["epsilon"] for event in rounds]
    assert all(a < b for a, b in pairwise(epsilons))
    assert end["total_density"] == pytest.approx(np.mean([event["density"] for event in rounds]))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_off_the_mask_the_model_does_not_change_by_one_bit_in_a_round(tmp_path: Path, optimizer: str) -> None:
    from server.checkpoint import Checkpoint
    from server.methods import open_policy

    config = small_config(tmp_path, name="x", server_optimizer=optimizer, final_density=0.2, value_coding="f32")
    models: list[np.ndarray] = []

    def remember(event: Event) -> None:
        # The checkpoint on disk is still that of the round before.
        if event["event"] == "round":
            models.append(Checkpoint.load(tmp_path / "x" / "checkpoint.npz").model)

    run_here(config, remember)
    models.append(Checkpoint.load(tmp_path / "x" / "checkpoint.npz").model)
    masks = open_policy(config, models[0].size)
    for number, (before, after) in enumerate(pairwise(models), start=1):
        kept = masks.mask(number).indices()
        off = np.setdiff1d(np.arange(before.size), kept)
        assert before[off].tobytes() == after[off].tobytes()
        assert (before[kept] != after[kept]).all()


@pytest.mark.parametrize(("optimizer", "averaging"), [("sgd", 0.0), ("adam", 0.8)])
def test_a_resumed_run_ends_like_one_that_was_not_interrupted(tmp_path: Path, optimizer: str, averaging: float) -> None:
    settings = {"rounds": 5, "cohort": 4, "server_optimizer": optimizer, "server_averaging": averaging}
    whole = run_here(small_config(tmp_path / "whole", name="x", **settings))

    def interrupt(event: Event) -> None:
        if event["event"] == "round" and event["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_here(small_config(tmp_path / "cut", name="x", **settings), interrupt)
    resumed = run_here(config_of_run(tmp_path / "cut" / "x"))
    assert resumed.model.tobytes() == whole.model.tobytes()
    assert resumed.epsilon == whole.epsilon
    assert resumed.uplink_bytes == whole.uplink_bytes
    assert [e["round"] for e in events_of(resumed, "round")] == [1, 2, 3, 4, 5]
    assert [e["round"] for e in events_of(resumed, "resume")] == [3]
    # A restarted server does not know any more which models the sites hold, and sends its own in full once.
    rows = [[{**row, "downlink": 0} for row in events_of(run, "end")[0]["sites"]] for run in (resumed, whole)]
    assert rows[0] == rows[1]


def test_a_finished_run_can_be_resumed_to_the_same_end(tmp_path: Path) -> None:
    first = run_here(small_config(tmp_path, name="x"))
    again = run_here(config_of_run(tmp_path / "x"))
    assert again.model.tobytes() == first.model.tobytes() and again.epsilon == first.epsilon


def test_without_privacy_every_output_says_so(tmp_path: Path) -> None:
    result = run_here(small_config(tmp_path, private=False, final_density=1.0))
    assert result.epsilon is None
    (start,) = events_of(result, "run")
    assert start["private"] is False and start["noise_multiplier"] == 0 and start["planned_epsilon"] is None
    assert {event["epsilon"] for event in events_of(result, "round")} == {None}
    assert "not-private" in result.folder.name


def test_dense_runs_are_the_same_command_with_density_one(tmp_path: Path) -> None:
    result = run_here(small_config(tmp_path, final_density=1.0))
    assert {event["density"] for event in events_of(result, "round")} == {1.0}


def test_federated_with_one_site_equals_centralised(tmp_path: Path) -> None:
    """One site, full batches, hardly any noise: the federation is the centralised algorithm."""
    from common.models import FlatModel, build, initial_vector
    from server.methods import open_policy
    from tests.support import SMALL_MODEL, brute_force_clipped_sum, small_dataset

    torch = pytest.importorskip("torch")
    config = small_config(
        tmp_path,
        sites=1,
        sampling_rate=1.0,
        steps_per_round=2,
        rounds=3,
        noise_multiplier=1e-6,
        epsilon=1e30,
        final_density=0.4,
    )
    federated = run_here(config).model

    reference = FlatModel(build(SMALL_MODEL))
    reference.load(initial_vector(SMALL_MODEL, config.seed))
    data = small_dataset()
    inputs, targets = torch.tensor(data.train_inputs), torch.tensor(data.train_targets)
    masks = open_policy(config, reference.size)
    for number in (1, 2, 3):
        kept = masks.mask(number).indices()
        for _ in range(2):
            total = brute_force_clipped_sum(reference, inputs, targets, kept, config.clip_norm)
            reference.vector[torch.tensor(kept)] -= torch.tensor(
                config.learning_rate * total / len(targets), dtype=torch.float32
            )
    assert federated == pytest.approx(reference.vector.numpy(), abs=1e-5)


def test_weighting_by_declared_size(tmp_path: Path) -> None:
    settings = {"partition": "sizes:zipf", "noise_multiplier": 1e-6, "epsilon": 1e30, "rounds": 1}
    uniform = run_here(small_config(tmp_path, **settings)).model
    by_size = run_here(small_config(tmp_path, weighting="size", **settings)).model
    assert not np.allclose(uniform, by_size)


@pytest.mark.parametrize(
    ("value_coding", "index_coding", "bits"),
    [("f32", "seed", 32), ("f16", "seed", 16), ("int8", "seed", 8.3), ("f32", "raw", 64), ("f32", "compact", 35)],
)
def test_every_coding_leads_to_nearly_the_same_model(
    tmp_path: Path, value_coding: str, index_coding: str, bits: float
) -> None:
    settings = {"rounds": 1, "density_schedule": "constant", "final_density": 0.5, "downlink_coding": "f32"}
    exact = run_here(small_config(tmp_path, value_coding="f32", **settings))
    other = run_here(small_config(tmp_path, value_coding=value_coding, index_coding=index_coding, **settings))
    assert np.abs(other.model - exact.model).max() < 0.02 * np.abs(exact.model).max()
    (event,) = events_of(other, "round")
    payload = event["uplink"]["values"] + event["uplink"]["index"]
    assert 8 * payload / event["kept"] / 6 == pytest.approx(bits, rel=0.05)


def test_calibrated_coding_adds_little_noise(tmp_path: Path) -> None:
    settings = {"rounds": 1, "density_schedule": "constant", "final_density": 1.0}
    exact = run_here(small_config(tmp_path, value_coding="f32", downlink_coding="f32", **settings)).model
    coded = run_here(small_config(tmp_path, downlink_coding="f32", **settings)).model
    both = run_here(small_config(tmp_path, **settings)).model
    noise = (
        run_here(small_config(tmp_path, value_coding="f32", downlink_coding="f32", seed=2, **settings)).model - exact
    )
    assert 0 < (coded - exact).std() < 0.2 * noise.std()
    assert 0 < (both - exact).std() < 0.5 * noise.std()


def test_without_noise_there_is_nothing_to_calibrate_to(tmp_path: Path) -> None:
    (start,) = events_of(run_here(small_config(tmp_path, private=False)), "run")
    assert (start["value_coding"], start["downlink_coding"], start["grid_entropy_bits"]) == ("f16", "f16", None)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("cohort", [0, 2])
def test_a_site_that_lost_its_model_is_given_it_in_full_within_the_round(
    tmp_path: Path, optimizer: str, cohort: int
) -> None:
    # Large enough for differences to be shorter than models.
    model = "mlp:12-100-3"
    settings = {"model": model, "rounds": 6, "server_optimizer": optimizer, "cohort": cohort, "final_density": 0.2}
    undisturbed = run_here(small_config(tmp_path / "a", name="x", **settings))

    def lose_models(event: Event) -> None:
        if event["event"] == "round" and event["round"] == 3:
            assert sites._provided is not None
            sites._provided._workbench.shelf.clear()

    result = run_here(small_config(tmp_path / "b", name="x", **settings), lose_models)
    assert result.model.tobytes() == undisturbed.model.tobytes()
    rounds, whole = events_of(result, "round"), events_of(undisturbed, "round")
    assert all(event["admitted"] == len(event["cohort"]) and not event["rejections"] for event in rounds)
    extra = [sum(a["downlink"].values()) - sum(b["downlink"].values()) for a, b in zip(rounds, whole, strict=True)]
    # Whoever held a model asks once, in the first round that it takes part in; of a small cohort nobody may have.
    assert max(extra) > 0 and extra[:3] == [0, 0, 0] and (cohort or extra[4:] == [0, 0])
    for more, event, other in zip(extra, rounds, whole, strict=True):
        assert (more > 0) == (sum(event["uplink"].values()) > sum(other["uplink"].values()))
        assert event["dense_downlink"] == other["dense_downlink"] and event["dense_uplink"] == other["dense_uplink"]
    assert result.epsilon == undisturbed.epsilon


def test_rounds_of_an_epoch_share_a_mask(tmp_path: Path) -> None:
    result = run_here(small_config(tmp_path, rounds=4, rounds_per_epoch=2))
    assert [event["epoch"] for event in events_of(result, "round")] == [0, 0, 1, 1]
    assert len({event["kept"] for event in events_of(result, "round")[:2]}) == 1


def test_evaluation_now_and_then(tmp_path: Path) -> None:
    result = run_here(small_config(tmp_path, rounds=5, evaluate_every=2))
    assert [e["accuracy"] is not None for e in events_of(result, "round")] == [False, True, False, True, True]
    assert run_here(small_config(tmp_path, evaluate_every=0)).accuracy is None


def test_nothing_is_written_or_asked_when_the_config_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"costs epsilon .* above epsilon=8"):
        run_here(small_config(out, noise_multiplier=0.01))
    for wrong in (Engine(actors=-1), Engine(gpus_per_actor=-0.1)):
        with pytest.raises(ConfigError, match="--actors and --gpus-per-actor of 0 or more"):
            simulate(small_config(out), wrong)
    assert not out.exists()
    with pytest.raises(RunFolderError, match="no run at"):
        config_of_run(out / "none")


@pytest.mark.parametrize("unit", ["record", "client"])
def test_a_run_that_every_site_fails_in_has_no_result(tmp_path: Path, unit: str) -> None:
    changes = {"privacy_unit": unit, "epsilon": 8.0 if unit == "record" else 1e3}
    config = small_config(tmp_path, name="x", model="mlp:99-3", evaluate_every=0, rounds=2, **changes)
    with pytest.raises(NothingLearned, match=r"none of 2 rounds .* round 1, site \d: the site failed: .*mat1 and mat2"):
        run_here(config)
    _, *rounds = read_events(tmp_path / "x" / "run.jsonl")  # and no end with an epsilon
    assert [event["event"] for event in rounds] == ["round", "round"] and not any(e["admitted"] for e in rounds)
    assert all("the site failed" in one["reason"] for event in rounds for one in event["rejections"])


def test_a_model_that_does_not_fit_the_test_set_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"mlp:99-3 does not take records of shape \(12,\)"):
        run_here(small_config(tmp_path / "out", model="mlp:99-3"))
    data = small_dataset()
    for targets, message in (
        (data.train_targets[:, None], r"mlp:12-8-3 has no loss for targets of shape \(1,\)"),
        (data.train_targets.astype(str), "expected targets that are classes"),
    ):
        arrays = {"train_inputs": data.train_inputs, "test_inputs": data.train_inputs}
        np.savez(tmp_path / "x.npz", train_targets=targets, test_targets=targets, **arrays)
        with pytest.raises((ModelError, DatasetError), match=message):
            run_here(small_config(tmp_path / "out", dataset=str(tmp_path / "x.npz")))
    with pytest.raises(DatasetError, match="expected classes 0 to 1, which mlp:12-2 tells apart, got 0 to 2"):
        run_here(small_config(tmp_path / "out", model="mlp:12-2"))
    assert not (tmp_path / "out").exists()


def test_an_impossible_partition_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="at least 2 records a site"):
        run_here(small_config(tmp_path / "out", sites=200))
    assert not (tmp_path / "out").exists()
