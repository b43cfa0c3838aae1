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
from pathlib import Path


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


def format_error(error: BaseException) -> str:
    """The last 16,000 characters of an error's traceback, from the first frame that is not ours.

    Who reads it looks for a mistake of their own, and how we came to call them says nothing of it. An error that we
    raised on purpose, with nobody else's code on the way, is its message alone.
    """
    import traceback  # takes milliseconds, and a program without mistakes never asks

    core = str(Path(__file__).parent)
    shown = traceback.TracebackException.from_exception(error)
    first = next((place for place, frame in enumerate(shown.stack) if not frame.filename.startswith(core)), None)
    if first is None and isinstance(error, LightningError):
        return "".join(shown.format_exception_only())[-16000:]
    del shown.stack[: first or 0]
    return "".join(shown.format())[-16000:]


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" when a known name is close to ``name``, else an empty string."""
    import difflib  # takes milliseconds, and a program without mistakes never asks

    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""
