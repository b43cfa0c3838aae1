"""Errors that Lightning raises.

    LightningError
      PluginError      (LookupError)              a plugin or component is missing, broken or clashes
      ConfigError      (ValueError)               a key, value or argument nobody accepts
      StoreError
        NotFoundError  (LookupError, ValueError)  an id the store does not know
        ConflictError  (RuntimeError)             a transition the lifecycle refuses, or a lost race
      AdapterError     (ValueError)               spans that cannot become training data
      RolloutError     (RuntimeError)             one rollout failed: recorded on it, never stops the run

Every error is also the builtin that a user would expect, and pickles with its message.
"""

from __future__ import annotations

from collections.abc import Iterable


class LightningError(Exception):
    """Anything Lightning raises on purpose."""


class PluginError(LightningError, LookupError):
    """A plugin or one of its components is missing, broken or clashes with another."""


class ConfigError(LightningError, ValueError):
    """A key, value or argument that nobody accepts."""

    setting: str | None = None
    """The setting of a component that was wrong, so that whoever read it from a file can say in which line."""


class StoreError(LightningError):
    """The store could not do what was asked."""


class NotFoundError(StoreError, LookupError, ValueError):
    """An id that the store does not know."""


class ConflictError(StoreError, RuntimeError):
    """A transition that the lifecycle refuses; nothing was changed."""


class AdapterError(LightningError, ValueError):
    """Spans that cannot be turned into training data."""


class RolloutError(LightningError, RuntimeError):
    """One rollout failed. It is recorded on the attempt and never stops the run."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" when a known name is close to ``name``, else an empty string."""
    import difflib  # takes milliseconds, and a program without mistakes never asks

    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""
