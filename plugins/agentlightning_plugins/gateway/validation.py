"""Checks of settings, with errors that name the setting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentlightning.errors import ConfigError, suggest


def check_keys(given: Iterable[object], known: Sequence[str], where: str) -> None:
    """Raises ConfigError for the first key that is not known."""
    for key in given:
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}.{suggest(str(key), known)} Keys: {', '.join(known)}.")


def check_number(value: object, name: str, *, allow_zero: bool = False) -> float:
    """Returns a number above 0, or of 0 or more if ``allow_zero``; raises ConfigError for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (value > 0 or (allow_zero and value == 0)):
        return value
    raise ConfigError(f"{name} is {value!r}; give a number {'of 0 or more' if allow_zero else 'above 0'}")
