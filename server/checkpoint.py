"""Checkpoints: one file, replaced atomically, from which a killed server goes on."""

import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.coding import Values
from common.errors import RunFolderError
from common.files import write_durably

_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that a server must remember between rounds."""

    model: Values
    run_id: str
    rounds_done: int
    model_version: int
    log_position: int
    seconds: float
    optimizer: dict[str, NDArray[Any]]
    privacy: dict[str, Any]
    traffic: dict[str, Any]
    counts: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it so that the file is either the old one or the whole new one, also after a power cut."""
        facts = {
            "format": _FORMAT,
            "run_id": self.run_id,
            "rounds_done": self.rounds_done,
            "model_version": self.model_version,
            "log_position": self.log_position,
            "seconds": self.seconds,
            "privacy": self.privacy,
            "traffic": self.traffic,
            "counts": self.counts,
        }
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {f"optimizer_{name}": array for name, array in self.optimizer.items()}
        np.savez(buffer, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), model=self.model, **arrays)
        write_durably(path, buffer.getbuffer())

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Read a checkpoint."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                facts = json.loads(arrays["facts"].tobytes())
                if facts.pop("format") != _FORMAT:
                    raise RunFolderError(f"{path} was written by another version of Fedsieve: resume it with that one")
                prefix = "optimizer_"
                return cls(
                    model=arrays["model"],
                    optimizer={n.removeprefix(prefix): arrays[n] for n in arrays.files if n.startswith(prefix)},
                    **facts,
                )
        except FileNotFoundError:
            raise RunFolderError(f"no checkpoint at {path}: this run cannot be resumed; start it anew") from None
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise RunFolderError(f"cannot read the checkpoint {path}: {error}") from error
