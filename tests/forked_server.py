"""Policy servers as forks of one process that has imported torch and transformers, which takes 5 s of CPU time.

Each process of pytest has one such process, which starts with the first server and ends with it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

IMPORTED = ("agentlightning_algorithms.shared.policy.server.app", "transformers.models.qwen2", "peft")


@functools.cache
def _forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    return context


def _run(arguments: list[str], env: Mapping[str, str], cwd: str, files: list[Any]) -> None:
    """Becomes the program ``python -m`` of the arguments, in a session of its own."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file.detach(), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "r" if number == 0 else "w", 1) for number in range(3))
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


class ForkedServer:
    """Has what the policy backend uses of ``subprocess.Popen``."""

    def __init__(self, command: list[str], env: Mapping[str, str], log: IO[bytes]) -> None:
        arguments = command[command.index("-m") + 1 :]
        their_input, self._input = os.pipe()
        output, their_output = os.pipe()
        self.stdin, self.stdout = os.fdopen(self._input, "wb"), os.fdopen(output, "rb")
        files = [DupFd(fd) for fd in (their_input, their_output, log.fileno())]
        self._process = _forks().Process(target=_run, args=(arguments, dict(env), str(Path.cwd()), files), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        os.close(their_input)
        os.close(their_output)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a policy server", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.pid is not None and self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> ForkedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.stdout.close()
        self._process.join()
