"""The errors that Lightning raises.

    LightningError
      PluginError      (LookupError)              a plugin or component is missing, broken or ambiguous
        PluginImportError (ImportError)           a component or one of its packages cannot be imported
      ConfigError      (ValueError)               an invalid key, value or argument
      StoreError
        NotFoundError  (LookupError, ValueError)  an id that the store does not know
        ConflictError  (RuntimeError)             a transition that the lifecycle forbids, or a lost race
      AdapterError     (ValueError)               spans that cannot become training data
      RolloutError     (RuntimeError)             one rollout failed: stored on its attempt, never stops the run

Every error is also the builtin that a user would expect, and pickles with its message.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class LightningError(Exception):
    """Base of all errors that Lightning raises deliberately."""


class PluginError(LightningError, LookupError):
    """A plugin or component is missing, broken or ambiguous."""


class PluginImportError(PluginError, ImportError):
    """A component cannot be imported, mostly because its extra is not installed; the message says how to get it."""


class ConfigError(LightningError, ValueError):
    """An invalid key, value or argument."""

    setting: str | None = None
    """The invalid setting of a component, from which a configuration file's line can be found."""


class StoreError(LightningError):
    """The store could not carry out a request."""


class NotFoundError(StoreError, LookupError, ValueError):
    """An id that the store does not know."""


class ConflictError(StoreError, RuntimeError):
    """A transition that the lifecycle forbids; nothing was changed."""


class AdapterError(LightningError, ValueError):
    """Spans that cannot be turned into training data."""


class RolloutError(LightningError, RuntimeError):
    """One rollout failed. It is stored on the attempt and never stops the run."""


def format_error(error: BaseException) -> str:
    """Returns the last 16,000 characters of a traceback, without our own frames at its start.

    An error of ours that no foreign code raised is its message only.
    """
    import traceback  # slow to import and rarely needed

    core = str(Path(__file__).parent)
    shown = traceback.TracebackException.from_exception(error)
    first = next((place for place, frame in enumerate(shown.stack) if not frame.filename.startswith(core)), None)
    if first is None and isinstance(error, LightningError):
        return "".join(shown.format_exception_only())[-16000:]
    del shown.stack[: first or 0]
    return "".join(shown.format())[-16000:]


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" if a known name is close to ``name``, else an empty string."""
    import difflib  # slow to import and rarely needed

    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""
