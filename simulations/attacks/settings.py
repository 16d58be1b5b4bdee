"""Settings of attacks: dataclasses that are parsed from an experiment's flat mapping."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from common.config import ConfigValue
from common.errors import ConfigError


def key_of(field_name: str) -> str:
    """Return the key of a field."""
    return field_name.replace("_", "-")


def parse_settings(kind: Any, settings: Mapping[str, ConfigValue]) -> Any:
    """Return a ``kind``: known keys, each of its type, none missing that has no default."""
    known = {key_of(field.name): field for field in fields(kind)}
    if unknown := sorted(settings.keys() - known.keys()):
        raise ConfigError(f"unknown setting {unknown[0]!r}: expected {', '.join(known)}")
    if missing := [key for key, field in known.items() if field.default is MISSING and key not in settings]:
        raise ConfigError(f"the setting {missing[0]!r} is missing")
    values: dict[str, Any] = {}
    for key, value in settings.items():
        wanted: Any = known[key].type
        given = float(value) if wanted is float and type(value) is int else value
        if type(given) is not wanted:
            raise ConfigError(f"expected {key} of type {wanted.__name__}, got {value!r}")
        values[known[key].name] = given
    return kind(**values)


def as_mapping(settings: Any) -> dict[str, ConfigValue]:
    """Return every setting by its key."""
    return {key_of(name): value for name, value in asdict(settings).items()}


def defaults_of(kind: Any) -> dict[str, ConfigValue]:
    """Return the defaults of the settings that have one."""
    return {key_of(field.name): field.default for field in fields(kind) if field.default is not MISSING}


def require_at_least(settings: Any, least: float, *names: str) -> None:
    """Refuse settings below ``least``."""
    for name in names:
        if not getattr(settings, name) >= least:
            raise ConfigError(f"expected {key_of(name)} of at least {least:g}, got {getattr(settings, name)!r}")


def require_above_zero(settings: Any, *names: str) -> None:
    """Refuse settings of 0 and below; a density must not be above 1 either."""
    for name in names:
        value = getattr(settings, name)
        if not value > 0 or (name == "density" and value > 1):
            raise ConfigError(
                f"expected {'0 < density <= 1' if name == 'density' else f'{key_of(name)} > 0'}, got {value!r}"
            )
