"""The folder of a run: run.jsonl, config.toml, checkpoint.npz and, once somebody asks for it, report.html."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from common.config import ConfigValue, RunConfig
from common.errors import RunFolderError

# What may differ between the first part of a run and its continuation: where it runs, never what it computes.
MAY_CHANGE = {"resume", "restart", "device", "out", "name", "round-deadline"}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name, which is its folder's."""
        return self.path.name

    @property
    def log(self) -> Path:
        """The run log."""
        return self.path / "run.jsonl"

    @property
    def config(self) -> Path:
        """The run config; ``flwr run . --run-config`` takes it as it is."""
        return self.path / "config.toml"

    @property
    def checkpoint(self) -> Path:
        """The latest checkpoint."""
        return self.path / "checkpoint.npz"

    @classmethod
    def create(cls, config: RunConfig) -> "RunFolder":
        """Make the folder of a new run; a name that was made up gets a number where it is taken already."""
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            folder = cls(out / (config.run_name if number == 1 else f"{config.run_name}-{number}"))
            try:
                folder.path.mkdir()
                break
            except FileExistsError:
                if config.restart:  # left by an attempt that ended before its first checkpoint, with nobody asked
                    folder.log.unlink(missing_ok=True)
                    break
                if config.name:
                    raise RunFolderError(
                        f"{folder.path} exists already: choose another 'name', remove it, or resume it"
                    ) from None
                number += 1
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in config.to_mapping().items())
        folder.config.write_text("".join(lines), encoding="utf-8")
        return folder

    @classmethod
    def has_begun(cls, config: RunConfig) -> bool:
        """Tell whether the run of this name has a checkpoint: no site has been asked for anything before the first."""
        return cls(Path(config.out) / config.run_name).checkpoint.exists()

    @classmethod
    def resume(cls, config: RunConfig) -> "RunFolder":
        """Open the folder of a run that goes on, with the config that it began with."""
        if not config.name:
            raise RunFolderError("a run is resumed by its name: set 'name' in the run config")
        folder = cls(Path(config.out) / config.name)
        began, now = folder.read_config(), config.to_mapping()
        changed = sorted(key for key in now if key not in MAY_CHANGE and began.get(key) != now[key])
        if changed:
            raise RunFolderError(
                f"{folder.path} was begun with another config: "
                + ", ".join(f"{key}={began.get(key)!r} then, {now[key]!r} now" for key in changed)
            )
        return folder

    def read_config(self) -> dict[str, ConfigValue]:
        """Return the run config that the run began with."""
        try:
            return dict(tomllib.loads(self.config.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise RunFolderError(f"no run at {self.path}: expected {self.config}") from None
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise RunFolderError(f"cannot read {self.config}: {error}") from error
