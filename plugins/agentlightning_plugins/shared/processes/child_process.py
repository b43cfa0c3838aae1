"""Child processes of the strategy ``cs``: starts, watches, drains and kills them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar

from agentlightning.execution import RunnerJob
from agentlightning_plugins.shared.processes.job_process import RECYCLE_EXIT_CODE, UNLOADABLE_EXIT_CODE, JobTarget
from agentlightning_plugins.shared.processes.pickling import dump_job
from agentlightning_plugins.shared.processes.stopping import until_second_interrupt
from agentlightning_plugins.shared.processes.supervisor import Ending

logger = logging.getLogger("agentlightning")
T = TypeVar("T")
_DRAIN_S: Final = 20.0
_MAX_THREADS: Final = 65536
_NEEDED_AT_START: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("PYTHON*", "COVERAGE_*", "LD_*", "DYLD_*", "MALLOC_*", "GLIBC_TUNABLES"),
)
"""The variables that an interpreter needs to start. All others may be secrets and arrive through the pipe: the user's
other programs can read the variables that a process was started with."""


class ChildProcesses:
    """Starts processes that run the same job on the same store.

    Each process is a new interpreter: the user's main module is not imported again, and no state is inherited.
    """

    def __init__(self, role: Literal["runner", "algorithm"], job: Any, target: JobTarget) -> None:
        self._role = role
        self._target = json.dumps(target).encode()
        self._job = dump_job(job)
        # One thread waits for each process; threads are created on demand, and idle ones end with this object.
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=f"{role}-processes")

    async def run(self, name: str) -> tuple[int, str]:
        """Runs one process to its end; returns its exit code and the last line of its stderr.

        Cancelling once lets the process finish its rollouts; a second cancellation, or a second Ctrl-C, kills it.
        """
        read_fd, write_fd = os.pipe()
        try:
            process = _start(self._role, name, read_fd)
            assert process.stdout is not None
            assert process.stderr is not None
            pumps = [_Pump(process.stdout, "stdout"), _Pump(process.stderr, "stderr")]
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        try:
            environment = json.dumps(dict(os.environ)).encode()
            await self._in_thread(_write_all, write_fd, self._target, environment, self._job)
            code = await self._in_thread(process.wait)
            await self._in_thread(_finish, pumps)
            return code, pumps[1].last_line
        except asyncio.CancelledError:
            process.terminate()
            try:
                await until_second_interrupt(self._in_thread(_drain, process))
            finally:
                process.kill()  # no effect if it has ended
            raise
        finally:
            os.close(write_fd)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


class RunnerProcesses:
    """Runners as processes of this machine."""

    def __init__(self, job: RunnerJob, target: JobTarget) -> None:
        self._processes = ChildProcesses("runner", job, target)

    async def run(self, worker_id: str) -> Ending:
        """See ``Runners``."""
        code, last_line = await self._processes.run(worker_id)
        if code == 0:
            return Ending("done")
        if code == RECYCLE_EXIT_CODE:
            return Ending("worn out")
        if code == UNLOADABLE_EXIT_CODE:
            return Ending("unloadable", last_line)
        return Ending("died", f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}")


class _Pump(threading.Thread):
    """Forwards the output of a process line by line, so that it does not corrupt this process's live display."""

    def __init__(self, source: IO[str], name: Literal["stdout", "stderr"]) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._name = name
        self.last_line = ""
        self.start()

    def run(self) -> None:
        with self._source:
            for line in self._source:
                self.last_line = line.strip() or self.last_line
                stream: IO[str] = getattr(sys, self._name)  # looked up now, because a live display replaces it
                with contextlib.suppress(ValueError, OSError):  # the stream is closed at the end of this process
                    stream.write(line)
                    stream.flush()


def _start(role: str, name: str, read_fd: int) -> subprocess.Popen[str]:
    here, given = str(Path(__file__).parents[3]), os.environ.items()
    env = {key: value for key, value in given if any(fnmatchcase(key, pattern) for pattern in _NEEDED_AT_START)}
    env["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "agentlightning_plugins.shared.processes.job_process", role, name, str(read_fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=(read_fd,),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,  # Ctrl-C reaches only this process, which stops its children in order
    )


def _finish(pumps: list[_Pump]) -> None:
    for pump in pumps:
        pump.join(1.0)  # a process that the agent left running may hold the pipe open


def _write_all(fd: int, *parts: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(fd), "wb") as pipe:  # the process died: see wait()
        for part in parts:
            pipe.write(len(part).to_bytes(8, "big") + part)


def _drain(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_DRAIN_S)
    except subprocess.TimeoutExpired:
        logger.warning("a process (pid %s) did not drain within %.0f s and is killed", process.pid, _DRAIN_S)
        process.kill()
        process.wait()
