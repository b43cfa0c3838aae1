"""The workspace of an attempt: a copy of a folder or of a commit, and the changes that the command made to it."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch, translate
from pathlib import Path
from typing import Any, Final, TypeAlias

from agentlightning.errors import ConfigError, RolloutError
from agentlightning_plugins.shared.sandbox.process import read_agent_file

IGNORED: Final = (".git", "node_modules", "__pycache__", "*.pyc", ".pytest_cache", ".venv")
"""Names of files and folders whose changes are not recorded."""
_MAX_DIFF_CHARS: Final = 64 * 1024
_MAX_FILE_LINES: Final = 2000
"""Longer files are named and not compared line by line, which takes quadratic time."""

State: TypeAlias = dict[str, tuple[int, ...]]
"""Files of a folder by relative path, with what changes when a file does."""


class Workspace:
    """The source of the folders in which the attempts of an agent work."""

    def __init__(self, source: str, ignore: Sequence[str] = ()) -> None:
        """Describes the source.

        Args:
            source: a folder, or ``git+URL@REF`` for a commit, branch or tag, which is fetched once. ``{name}`` is
                replaced by that field of the task.
            ignore: further patterns of names whose changes are not recorded.
        """
        self._source = source
        self._ignored = (*IGNORED, *ignore)

    def find(self, task: Any) -> Path:
        """Returns the folder that a task's workspace is copied from; fetches a commit that was not needed before.

        Raises:
            RolloutError: the task lacks a field, there is no such folder, or the commit cannot be fetched.
        """
        try:
            source = self._source.format_map(task if isinstance(task, Mapping) else {})
        except (KeyError, IndexError, ValueError) as error:
            raise RolloutError(f"workspace = {self._source!r}: the task has no field for it: {error}") from None
        folder = _fetch(source) if source.startswith("git+") else Path(source).expanduser()
        if not folder.is_dir():
            raise RolloutError(f"workspace = {source!r}: there is no such folder")
        return folder

    def make(self, task: Any, folder: Path) -> tuple[Path, State]:
        """Copies the source of a task into a new folder; returns the source and the state of the copy for ``diff``."""
        source = self.find(task)
        copy(source, folder)
        return source, self.read_state(folder)

    def diff(self, source: Path, before: State, folder: Path) -> str:
        """Returns what changed in a workspace, as a unified diff of at most 64 KiB."""
        after = self.read_state(folder)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        text = ""
        for number, name in enumerate(changed):
            text += _compare(name, source if name in before else None, folder if name in after else None)
            if len(text) > _MAX_DIFF_CHARS:
                return f"{text[:_MAX_DIFF_CHARS]}\n... and {len(changed) - number - 1} more files\n"
        return text

    def read_state(self, folder: Path) -> State:
        """Returns the state of the files in a folder."""
        return {
            name: (
                info.st_ino,
                info.st_mode,
                info.st_size,
                info.st_mtime_ns,
                info.st_ctime_ns,  # no program can set this one
            )
            for name, info in _walk(folder, self._ignored)
        }


def copy(source: Path, target: Path) -> None:
    """Copies the content of a folder, with links, modes and times, into another one.

    ``cp`` shares the blocks of files where the file system can, and takes half the time of ``shutil.copytree``
    elsewhere.
    """
    done = subprocess.run(
        ["cp", "-a", f"{source}/.", target],  # noqa: S607 the system's
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RolloutError(f"the folder {source} cannot be copied: {done.stderr.strip()[-500:]}")


def restore(source: Path, folder: Path, patterns: Sequence[str]) -> None:
    """Makes the changed, removed and new files whose paths match a pattern equal to the source again.

    ``*`` also matches ``/``. No link is followed.
    """

    def matching(root: Path) -> list[str]:
        return [name for name, _ in _walk(root, ()) if any(fnmatch(name, pattern) for pattern in patterns)]

    for name in matching(folder):
        (folder / name).unlink()
    for name in matching(source):
        target = folder
        for part in Path(name).parts:
            if target.is_symlink() or not target.is_dir():  # the agent put something else in the place of a folder
                target.unlink(missing_ok=True)
                target.mkdir()
            target /= part
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        shutil.copy2(source / name, target, follow_symlinks=False)


def _walk(folder: Path, ignored: Sequence[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yields everything below a folder except folders, by relative path; does not follow links."""
    is_ignored = re.compile("|".join(map(translate, ignored)) or r"(?!)").match
    waiting = [""]
    while waiting:
        place = waiting.pop()
        try:
            entries = list(os.scandir(folder / place))
        except OSError:  # the agent made it unreadable
            continue
        for entry in entries:
            if is_ignored(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{place}{entry.name}/")
            else:
                yield place + entry.name, entry.stat(follow_symlinks=False)


def _compare(name: str, source: Path | None, folder: Path | None) -> str:
    def read(root: Path | None) -> list[str] | None:
        if root is None:
            return []
        try:
            lines = read_agent_file(root / name).splitlines()
        except RolloutError:  # a link, a pipe, or too long
            return None
        return lines if len(lines) <= _MAX_FILE_LINES and not any("\0" in line for line in lines) else None

    before, after = read(source), read(folder)
    labels = (f"a/{name}" if source else "/dev/null", f"b/{name}" if folder else "/dev/null")
    if before is None or after is None:
        return f"--- {labels[0]}\n+++ {labels[1]}\n(not a text of at most {_MAX_FILE_LINES} lines)\n"
    lines = list(difflib.unified_diff(before, after, *labels, lineterm=""))
    return "".join(f"{line}\n" for line in lines or (f"--- {labels[0]}", f"+++ {labels[1]}"))


def _fetch(source: str) -> Path:
    """Returns the folder with one commit of a repository, without its history; fetches it at the first use."""
    url, _, ref = source.removeprefix("git+").rpartition("@")
    if not url or "/" in ref or ref.startswith("-"):
        raise ConfigError(f"workspace = {source!r}: write git+URL@REF, with a commit, a branch or a tag")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agentlightning" / "workspaces"
    folder = cache / hashlib.sha256(source.encode()).hexdigest()[:32]
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        new = tempfile.mkdtemp(dir=cache)
        _git("init", "--quiet", new)
        _git("-C", new, "fetch", "--quiet", "--depth", "1", "--", url, ref)
        _git("-C", new, "checkout", "--quiet", "FETCH_HEAD")
        try:
            Path(new).rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return folder


def _git(*arguments: str) -> None:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments],  # noqa: S607 the user's
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise RolloutError(f"git cannot be started: {error}") from None
    if done.returncode:
        raise RolloutError(f"git {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")
