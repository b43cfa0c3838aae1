"""The errors that Lightning raises. They subclass the builtins that users expect, and pickle with their messages.

LightningError
├── PluginError (LookupError)
│   └── PluginImportError (ImportError)
├── ConfigError (ValueError)
│   └── QuotaError
├── StoreError
│   ├── NotFoundError (LookupError, ValueError)
│   └── ConflictError (RuntimeError)
├── AdapterError (ValueError)
└── RolloutError (RuntimeError)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceback import FrameSummary


class LightningError(Exception):
    """Base of all errors that Lightning raises deliberately."""


class PluginError(LightningError, LookupError):
    """A plugin or component is missing, broken or ambiguous."""


class PluginImportError(PluginError, ImportError):
    """A component cannot be imported, usually because its extra is not installed; the message says how to get it."""


class ConfigError(LightningError, ValueError):
    """An invalid key, value or argument."""

    setting: str | None = None
    """Name of the component's invalid setting, with which the line of a configuration file can be found."""


class QuotaError(ConfigError):
    """Spans above the limit of their attempt or run; none of them was stored."""


class StoreError(LightningError):
    """The store could not carry out a request."""


class StorageFullError(StoreError):
    """The disk of the database is full; the write was not stored."""


class NotFoundError(StoreError, LookupError, ValueError):
    """An id that is not in the store."""


class ConflictError(StoreError, RuntimeError):
    """A transition that the lifecycle forbids, or a lost race; nothing was changed."""


class AdapterError(LightningError, ValueError):
    """Spans that cannot be turned into training data."""


class RolloutError(LightningError, RuntimeError):
    """An error that fails one rollout. It is stored on the attempt and never stops the run."""


def format_error(error: BaseException) -> str:
    """Returns the last 16,000 characters of a traceback, from the first frame of the user's code.

    A traceback without user code, such as one from a library that our code calls, keeps its last frames. A
    LightningError whose traceback has only frames of Lightning is shown without them.
    """
    import traceback  # slow to import and rarely needed

    shown = traceback.TracebackException.from_exception(error)
    if isinstance(error, LightningError) and all(_is_ours(frame.filename) for frame in shown.stack):
        return "".join(shown.format_exception_only())[-16000:]
    part: traceback.TracebackException | None = shown
    while part is not None:
        _cut(part.stack)
        part = part.__cause__ or part.__context__
    return "".join(shown.format())[-16000:]


def _cut(stack: list[FrameSummary]) -> None:
    """Removes the frames before the first frame of user code; without user code, all but the last three."""
    own = (
        place for place, frame in enumerate(stack) if not _is_ours(frame.filename) and not _is_library(frame.filename)
    )
    del stack[: next(own, max(0, len(stack) - 3))]


def _is_ours(filename: str) -> bool:
    plugins = {"agentlightning_algorithms", "agentlightning_integrations", "agentlightning_plugins"}
    return Path(filename).is_relative_to(Path(__file__).parent) or bool(plugins & set(Path(filename).parts))


def _is_library(filename: str) -> bool:
    installed = {"site-packages", "dist-packages"} & set(Path(filename).parts)
    return bool(installed) or filename.startswith(("<frozen", str(Path(os.__file__).parent)))


def install_command(extra: str, distribution: str = "lightning") -> str:
    """Returns the command that installs a distribution from where it came, with the environment's own installer.

    ``extra`` is the extra to install with it, or empty.
    """
    import importlib.metadata
    import importlib.util
    import json

    pip = "uv pip" if importlib.util.find_spec("pip") is None else "pip"  # an environment of `uv venv` has no pip
    extra = extra and f"[{extra}]"
    what = f"{distribution}{extra}"
    try:
        found = importlib.metadata.Distribution.from_name(distribution)
        origin = json.loads(found.read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    if url.startswith("file://") and "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"{pip} install {editable}'{url.removeprefix('file://')}{extra}'"
    return f"{pip} install '{what} @ {url}'" if url.startswith("file://") else f"{pip} install '{what}'"


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" if a known name is close to ``name``, else an empty string."""
    import difflib  # slow to import and rarely needed

    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""
