"""The directory of a run: its identity, and the lock that keeps other processes out."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agentlightning import __version__
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager

logger = logging.getLogger("agentlightning")
RECORD_NAME: Final = "run.json"
_LOCK_NAME: Final = ".lock"


@contextlib.contextmanager
def open_directory(path: Path, *, resume: bool = False, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Creates a new run's directory, or opens the directory of a run to resume, for this process; yields its record.

    The record, ``run.json``, holds ``key`` (from which the ids of its rollouts are made), ``created_at`` and
    ``resumed_at`` (Unix times), ``seed``, ``versions``, ``plugins`` (the distributions of plugins that are not ours),
    and ``arguments`` and ``working_directory`` of the command that started it.

    Raises:
        ConfigError: the directory cannot be created, holds another run or no run to resume, is used by another process,
            or its run uses a plugin that is not installed.
    """
    file = path / RECORD_NAME
    if resume and not file.is_file():
        raise ConfigError(f"{path} holds no run to resume: {file} is missing")
    make_directory(path)
    try:
        lock = (path / _LOCK_NAME).open("a+")
    except OSError as error:
        raise _unusable(path, error) from error
    with lock:
        lock.seek(0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = lock.read().strip() or "unknown"
            message = f"another process (pid {holder}) works in {path}; stop it, or use another directory"
            raise ConfigError(message) from error
        except OSError as error:  # some network file systems have no locks
            message = f"{path} cannot be locked: {error.strerror}; choose a directory on a local disk"
            raise ConfigError(message) from error
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        record = read_record(path) if resume else _new_record(path, seed)
        check_plugins(path, record)
        if resume:
            record.setdefault("resumed_at", []).append(time.time())
        _write(file, record)
        yield record


def make_directory(path: Path) -> bool:
    """Creates a run's directory, readable by its user only, and returns whether it is new; ConfigError on failure."""
    try:
        path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        if path.is_dir():
            return False
        raise _unusable(path, error) from error
    return True


def inside(directory: Path, path: Path) -> Path:
    """Returns the path of a file or folder of a run; another person may have made the run's directory.

    Raises:
        ConfigError: the path, or a link in it, leads out of the directory, or to a pipe or a device.
    """
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(f"{path} leads out of {directory}, so it is not opened")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path} is a pipe or a device, so it is not opened")
    return path


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be the directory of a run: {error.strerror or error}; choose another")


def read_record(path: Path) -> dict[str, Any]:
    """Returns the content of ``run.json`` in a run's directory; raises ConfigError if it is missing or damaged."""
    file = inside(path, path / RECORD_NAME)
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record["key"], str) or not isinstance(record.get("resumed_at", []), list):
            raise TypeError("key must be a string and resumed_at a list")
    except (FileNotFoundError, NotADirectoryError):
        what = "is a file" if path.is_file() else f"holds no run: {file} is missing"
        raise ConfigError(f"{path} {what}; name the directory of a run, such as runs/NAME") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not the record of a run: {error!r}") from error
    return record


def check_plugins(path: Path, record: Mapping[str, Any]) -> None:
    """Compares the plugins that a run used, as its record says, with those that are installed.

    Raises:
        ConfigError: one of them is not installed. Another version is a warning.
    """
    for name, version in record.get("plugins", {}).items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            need = f"{name}=={version}"
            raise ConfigError(f"the run in {path} uses plugins of {need}; install it: pip install '{need}'") from None
        if installed != version:
            logger.warning("the run in %s began with %s %s, and %s is installed", path, name, version, installed)


def _new_record(path: Path, seed: int) -> dict[str, Any]:
    if (path / RECORD_NAME).exists():
        raise ConfigError(f"{path} holds a run already; resume it, or use another directory")
    return {
        "key": os.urandom(16).hex(),
        "created_at": time.time(),
        "resumed_at": [],
        "seed": seed,
        "versions": {"python": sys.version.split()[0], "lightning": __version__, **_find_versions()},
        "plugins": get_manager().used(),
        "arguments": sys.argv,
        "working_directory": str(Path.cwd()),
    }


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
    """Replaces the file atomically, so that a killed process leaves the old or the new file."""
    draft = file.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as stream:
        json.dump(record, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory that replaces ``target``, durably, when the block ends without an error.

    An existing ``target`` is first moved to ``<target>.old``; if the process is killed before the replacement,
    :func:`recover_directory` restores it.
    """
    scratch = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            _fsync(path)
        old = target.with_name(f"{target.name}.old")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        scratch.rename(target)
        _fsync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def recover_directory(target: Path) -> Path:
    """Returns ``target``, after restoring its predecessor if the process was killed while replacing it."""
    old = target.with_name(f"{target.name}.old")
    if old.exists() and not target.exists():
        old.rename(target)
    return target


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
