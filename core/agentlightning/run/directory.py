"""The directory of a run: its identity, and the lock that keeps other processes out."""

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

    ``run.json`` holds ``key`` (from which the ids of its rollouts are made), ``created_at`` and ``resumed_at`` (Unix
    times), ``seed``, ``versions``, and ``arguments`` and ``working_directory`` of the command that started it.
    """

    def __init__(self, path: Path, record: Mapping[str, Any], lock: IO[str]) -> None:
        self.path = path
        self.record = record
        self.key: str = record["key"]
        self.seed: int = record.get("seed", 0)
        self._lock = lock

    @classmethod
    def open(cls, path: Path, *, resume: bool = False, seed: int = 0) -> RunDirectory:
        """Creates the directory of a new run with this seed, or opens that of a run to resume.

        Raises:
            ConfigError: it cannot be created, holds another run or none to resume, or another process uses it.
        """
        file = path / RECORD_NAME
        if resume and not file.is_file():
            raise ConfigError(f"{path} holds no run to resume: {file} is missing")
        make_directory(path)
        try:
            lock = (path / _LOCK_NAME).open("a+")
        except OSError as error:
            raise _unusable(path, error) from error
        with contextlib.ExitStack() as stack:
            stack.callback(lock.close)
            lock.seek(0)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = lock.read().strip() or "unknown"
                raise ConfigError(
                    f"another process (pid {holder}) works in {path}; stop it, or use another directory"
                ) from error
            lock.truncate()
            lock.write(str(os.getpid()))
            lock.flush()
            record = _resume(file) if resume else _begin(file, seed)
            stack.pop_all()
        return cls(path, record, lock)

    def close(self) -> None:
        """Releases the lock."""
        self._lock.close()


def make_directory(path: Path) -> bool:
    """Creates a directory for a run, which only its user may read, with parents; returns whether it is new.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        if path.is_dir():
            return False
        raise _unusable(path, error) from error
    return True


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be the directory of a run: {error.strerror or error}; choose another")


def read_record(path: Path) -> dict[str, Any]:
    """Returns the content of ``run.json`` in a run's directory.

    Raises:
        ConfigError: it is missing or damaged.
    """
    file = path / RECORD_NAME
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record["key"], str) or not isinstance(record.get("resumed_at", []), list):
            raise TypeError("its key is no text, or its resumed_at no list")
    except (FileNotFoundError, NotADirectoryError):
        what = "is a file" if path.is_file() else f"holds no run: {file} is missing"
        raise ConfigError(f"{path} {what}; name the directory of a run, such as runs/NAME") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not the record of a run: {error!r}") from error
    return record


def _begin(file: Path, seed: int) -> dict[str, Any]:
    if file.exists():
        raise ConfigError(f"{file.parent} holds a run already; resume it, or use another directory")
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


def _resume(file: Path) -> dict[str, Any]:
    record = read_record(file.parent)
    record.setdefault("resumed_at", []).append(time.time())
    _write(file, record)
    return record


def _find_versions() -> dict[str, str]:
    """Returns the versions of our installed dependencies."""
    versions = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        needed = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in importlib.metadata.requires("lightning") or ()}
        for name in sorted(needed):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
    return versions


def _write(file: Path, record: Mapping[str, Any]) -> None:
    """Replaces the file atomically, so that a kill leaves the old or the new one."""
    draft = file.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as stream:
        json.dump(record, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)
