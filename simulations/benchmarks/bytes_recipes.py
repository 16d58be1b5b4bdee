"""The recipes of the communication benchmark: candidates, and which of them was found best where."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.config import ConfigValue
from common.errors import ConfigError

RECIPES = Path(__file__).with_name("bytes_recipes.toml")


@dataclass(frozen=True, slots=True)
class Choice:
    """The recipe that was found best for the systems of a kind in a setting; accuracy None: chosen by hand."""

    kind: str
    partition: str
    epsilon: float
    recipe: str
    accuracy: float | None = None

    @property
    def where(self) -> tuple[str, str, float]:
        """What the choice is for."""
        return self.kind, self.partition, self.epsilon


@dataclass(frozen=True, slots=True)
class Recipes:
    """The recipe file, parsed."""

    path: Path
    candidates: Mapping[str, Mapping[str, ConfigValue]]
    choices: tuple[Choice, ...]

    @classmethod
    def load(cls, path: Path) -> "Recipes":
        """Read the file; every chosen recipe must be one of the candidates."""
        try:
            content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
            candidates = {str(name): dict(changes) for name, changes in content["search"].items()}
            choices = tuple(Choice(**entry) for entry in content.get("chosen", ()))
        except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{path}: expected tables [search.NAME] of run-config changes and entries [[chosen]] with kind, "
                f"partition, epsilon and recipe ({type(error).__name__}: {error})"
            ) from error
        for choice in choices:
            if choice.recipe not in candidates:
                known = ", ".join(candidates)
                raise ConfigError(f"{path}: chosen recipe {choice.recipe!r} is not in [search], which has {known}")
        return cls(path, candidates, choices)

    def chosen(self, kind: str, partition: str, epsilon: float) -> str:
        """Return the name of the recipe that was chosen."""
        for choice in self.choices:
            if choice.where == (kind, partition, epsilon):
                return choice.recipe
        raise ConfigError(
            f"{self.path} has no [[chosen]] with kind={kind!r}, partition={partition!r}, epsilon={epsilon:g}: add it, "
            "or find it with 'python -m simulations.benchmarks.bytes --search'"
        )

    def save(self, found: Sequence[Choice]) -> None:
        """Rewrite the chosen entries; those that ``found`` does not speak of stay, as does all that comes before."""
        merged = {choice.where: choice for choice in (*self.choices, *found)}
        before = re.split(r"^\[\[chosen\]\]", self.path.read_text(encoding="utf-8"), maxsplit=1, flags=re.M)[0].rstrip()
        # JSON's strings and numbers are TOML's too; a null has no place in TOML and is left out.
        entries = [
            "".join(f"{key} = {json.dumps(value)}\n" for key, value in asdict(choice).items() if value is not None)
            for choice in merged.values()
        ]
        text = "\n\n".join([before, *(f"[[chosen]]\n{entry.rstrip()}" for entry in entries)])
        self.path.write_text(f"{text}\n", encoding="utf-8")
