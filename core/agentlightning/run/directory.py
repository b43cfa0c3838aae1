"""The directory of a run: whose it is and what it needs to be continued after its process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from agentlightning.errors import ConfigError
from agentlightning.version import __version__

RECORD_NAME: Final = "run.json"
_LOCK_NAME: Final = ".lock"


class RunDirectory:
    """A directory that belongs to one run and, while it is open, to one process.

    ``run.json`` says what the run is: ``key`` (makes the ids of its rollouts), ``created_at`` and ``resumed_at`` (Unix
    times), ``seed``, ``versions``, and ``arguments`` and ``working_directory`` of the command that began it.
    """

    def __init__(self, path: Path, record: Mapping[str, Any], lock: IO[str]) -> None:
        self.path = path
        self.record = record
        self._lock = lock

    @property
    def key(self) -> str:
        """What makes the ids of this run's rollouts; the same in every life of the run."""
        key: str = self.record["key"]
        return key

    @property
    def seed(self) -> int:
        """What the run draws with; the same in every life of the run."""
        seed: int = self.record.get("seed", 0)
        return seed

    @classmethod
    def open(cls, path: Path, *, resume: bool = False, seed: int = 0) -> RunDirectory:
        """Makes the directory of a new run with this seed, or takes over that of a run to continue.

        Raises:
            ConfigError: it cannot be made; it holds another run, or none to resume; another process works in it.
        """
        file = path / RECORD_NAME
        if resume and not file.is_file():
            raise ConfigError(f"{path} holds no run to resume: {file} is missing")
        make_directory(path)
        try:
            lock = (path / _LOCK_NAME).open("a+")
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise ConfigError(
                f"another process (pid {holder}) works in {path}; stop it, or take another directory"
            ) from error
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            record = _continue(file) if resume else _begin(file, seed)
        except BaseException:
            lock.close()
            raise
        return cls(path, record, lock)

    def close(self) -> None:
        """Lets other processes work in the directory."""
        self._lock.close()


def make_directory(path: Path) -> bool:
    """Makes a directory for a run, and those above it; returns whether it was not there before.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.mkdir(parents=True)
    except OSError as error:
        if path.is_dir():
            return False
        raise _unusable(path, error) from error
    return True


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be the directory of a run: {error.strerror or error}; choose another")


def read_record(path: Path) -> dict[str, Any]:
    """What ``run.json`` in a run's directory says.

    Raises:
        ConfigError: it is missing or damaged.
    """
    file = path / RECORD_NAME
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        record["key"]
    except (FileNotFoundError, NotADirectoryError):
        what = "is a file" if path.is_file() else f"holds no run: {file} is missing"
        raise ConfigError(f"{path} {what}; name the directory of a run, such as runs/NAME") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not the record of a run: {error!r}") from error
    return record


def _begin(file: Path, seed: int) -> dict[str, Any]:
    if file.exists():
        raise ConfigError(f"{file.parent} holds a run already; resume it, or take another directory")
    record = {
        "key": os.urandom(16).hex(),
        "created_at": time.time(),
        "resumed_at": [],
        "seed": seed,
        "versions": {"python": sys.version.split()[0], "lightning": __version__, **_find_versions()},
        "arguments": sys.argv,
        "working_directory": str(Path.cwd()),
    }
    _write(file, record)
    return record


def _find_versions() -> dict[str, str]:
    """Of what is installed of all that Lightning works with."""
    versions = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        needed = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in importlib.metadata.requires("lightning") or ()}
        for name in sorted(needed):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
    return versions


def _continue(file: Path) -> dict[str, Any]:
    record = read_record(file.parent)
    record.setdefault("resumed_at", []).append(time.time())
    _write(file, record)
    return record


def _write(file: Path, record: Mapping[str, Any]) -> None:
    """Replaces the file in one step, so that a kill leaves the old one or the new one."""
    draft = file.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as stream:
        json.dump(record, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)
