"""Results that come with Fedsieve: a text file for each experiment, so that anyone can show and complete its table.

The first line has the settings that all results share, every other line one case with one seed and what it had besides.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.errors import ConfigError, RunFolderError
from simulations.experiments.definition import FOLDER as DEFINITIONS
from simulations.experiments.definition import Experiment, shipped
from simulations.experiments.results import Result, Results

FOLDER = DEFINITIONS / "published"


def publish(experiment: Experiment, results: Results, folder: Path = FOLDER) -> Path | None:
    """Write down what was measured with today's definition; returns the file, None where there is nothing to write.

    What was published for another definition is gone then.
    """
    if not _comes_with_fedsieve(experiment):
        raise ConfigError(f"expected an experiment that comes with Fedsieve, in full, got {experiment.name!r}")
    path = folder / f"{experiment.name}.jsonl"
    found = [
        (case.name, seed, result) for case in experiment.cases for seed, result in results.of(experiment, case).items()
    ]
    if not found:
        path.unlink(missing_ok=True)
        return None
    first = found[0][2].settings
    shared = {key: value for key, value in first.items() if all(one.settings.get(key) == value for *_, one in found)}
    head = {"experiment": experiment.name, "measure": experiment.measure.name, "settings": shared}
    lines: list[dict[str, Any]] = [head]
    for case, seed, result in found:
        own = {key: value for key, value in result.settings.items() if key not in shared}
        facts = {"seconds": round(result.seconds, 1), "finished": round(result.finished), "version": result.version}
        lines.append({"case": case, "seed": seed, "settings": own, "figures": dict(result.figures), **facts})
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line, sort_keys=True)}\n" for line in lines), encoding="utf-8")
    return path


@contextmanager
def published_results(experiments: Sequence[Experiment], folder: Path = FOLDER) -> Iterator[Results]:
    """Give what was published of the experiments."""
    with Results(None) as results:
        for experiment in experiments:
            if _comes_with_fedsieve(experiment):
                for case, seed, result in _read(experiment, folder / f"{experiment.name}.jsonl"):
                    results.put(experiment, case, seed, result)
        yield results


def _comes_with_fedsieve(experiment: Experiment) -> bool:
    return not experiment.quick and experiment.path in shipped()


def _read(experiment: Experiment, path: Path) -> Iterator[tuple[str, int, Result]]:
    if not path.exists():
        return
    try:
        head, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        if head["measure"] != experiment.measure.name:
            return
        for line in lines:
            settings = {**head["settings"], **line["settings"]}
            figures = {name: float(value) for name, value in line["figures"].items()}
            result = Result(settings, figures, float(line["seconds"]), float(line["finished"]), str(line["version"]))
            yield str(line["case"]), int(line["seed"]), result
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{path} is not a file of published results ({type(error).__name__}: {error}): restore it with git"
        ) from error
