"""Runs a command in its own process group, captures its output and stops the group as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agentlightning.errors import RolloutError
from agentlightning.run.thread import run_in_thread

logger = logging.getLogger("agentlightning")
_DRAIN_S: Final = 2.0
"""How long to read output after the whole group has ended: a process that left the group can keep the pipe open."""

_MAX_SEARCHES: Final = 10
_MAX_FILE_BYTES: Final = 2**20
"""Largest size of a file that is read from an agent."""


class Tail(asyncio.Protocol):
    """The last bytes of a stream."""

    def __init__(self, max_bytes: int) -> None:
        self.dropped = 0
        """Bytes that were discarded."""
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._transport: asyncio.BaseTransport | None = None
        self._ended = asyncio.Event()

    @property
    def text(self) -> str:
        """The kept bytes; invalid UTF-8 is replaced."""
        return self._data.decode(errors="replace")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        excess = len(self._data) - self._max_bytes
        if excess > 0:
            del self._data[:excess]
            self.dropped += excess

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    async def finish(self) -> None:
        """Reads the rest of the pipe, and closes it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await self._ended.wait()
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def read_agent_file(path: Path) -> str:
    """Returns the text of a file that an agent may have written; empty if there is none.

    It follows no link, and waits for no pipe without a writer and no device.

    Raises:
        RolloutError: it is not a regular file, is larger than 1 MiB, or cannot be read.
    """
    name = f"the agent's file {path.name!r}"
    try:
        with open(path, "rb", opener=_open_as_it_is) as file:  # Path.open takes no opener
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RolloutError(f"{name} is not a regular file")
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:  # of a link, ELOOP
        raise RolloutError(f"{name} cannot be read as a regular file: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise RolloutError(f"{name} has more than {_MAX_FILE_BYTES} bytes")
    return data.decode(errors="replace")


def _open_as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


async def run_group(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None,
    stdin: Path,
    stdout: Tail,
    stderr: Tail,
    kill_after_s: float,
    daemons_of: str | None = None,
) -> int:
    """Runs a command in its own process group until it exits; then kills the rest of the group.

    When the caller is cancelled, the group gets SIGTERM, and SIGKILL after ``kill_after_s``. ``stdout`` and ``stderr``
    receive the output even if this raises. With ``daemons_of``, processes outside the group that have this attempt in
    their environment are killed too, on Linux.

    Returns:
        The exit code; -n if signal n ended the command.

    Raises:
        RolloutError: the command cannot be started.
    """
    loop = asyncio.get_running_loop()
    process = _start(arguments, env, cwd, stdin)
    assert process.stdout is not None
    assert process.stderr is not None
    wait = functools.partial(_await_end, process, daemons_of)
    ended = asyncio.create_task(run_in_thread(wait, name=f"command-{process.pid}"))
    try:
        reading = asyncio.gather(
            loop.connect_read_pipe(lambda: stdout, process.stdout),
            loop.connect_read_pipe(lambda: stderr, process.stderr),
        )
        await asyncio.shield(reading)  # cancelled, it would close the pipes: SIGPIPE would end the clean-up
        await asyncio.wait({ended})
        await asyncio.gather(stdout.finish(), stderr.finish())
        return ended.result()
    finally:
        try:
            if not ended.done():
                await _stop(process, ended, kill_after_s)
        finally:  # even if the caller is cancelled once more
            stdout.close()
            stderr.close()


def _start(arguments: Sequence[str], env: Mapping[str, str], cwd: str | None, stdin: Path) -> subprocess.Popen[bytes]:
    try:
        with stdin.open("rb") as task:
            return subprocess.Popen(
                arguments,
                env=env,
                cwd=cwd,
                stdin=task,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
        hint = ""
        if isinstance(error, OSError) and error.errno == 7:  # E2BIG
            hint = "; a task this long fits in stdin only: task_via='stdin'"
        raise RolloutError(f"the command {arguments[0]!r} cannot be started: {error}{hint}") from error


def _await_end(process: subprocess.Popen[bytes], attempt_id: str | None) -> int:
    """Waits for the first process of the group, kills the rest of it, and returns the first one's exit code.

    On Linux, it also kills processes in other groups that have the attempt in their environment, such as daemons.

    The first process is reaped last, because until then the id of its group cannot be reused.
    """
    if hasattr(os, "waitid"):  # not on every macOS
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()
    _signal(process, signal.SIGKILL)
    for _ in range(_MAX_SEARCHES if attempt_id else 0):  # a process may start another one while it is looked for
        if not _kill_marked(f"AGL_ATTEMPT_ID={attempt_id}".encode()):
            break
    return process.wait()


def _kill_marked(variable: bytes) -> bool:
    """Kills the user's processes with a variable in their environment; returns whether there were any."""
    is_found = False
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if variable in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)
                is_found = True
    return is_found


async def _stop(process: subprocess.Popen[bytes], ended: asyncio.Task[int], kill_after_s: float) -> None:
    _signal(process, signal.SIGTERM)
    try:
        await asyncio.wait({ended}, timeout=kill_after_s)
    finally:  # even if the caller is cancelled during the wait
        if not ended.done():
            _signal(process, signal.SIGKILL)
    await asyncio.wait({ended})


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended; macOS raises PermissionError
        os.killpg(process.pid, number)


_PR_SET_DUMPABLE: Final = 4


@functools.cache
def hide_process() -> None:
    """On Linux, keeps the user's programs from reading this process's environment and memory; elsewhere, does nothing.

    The user's debuggers and profilers can then no longer attach, and a crash leaves no core dump. Programs that this
    process starts are not affected.
    """
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        logger.warning("commands can read the environment of this process: errno %d", ctypes.get_errno())
