"""Sandboxes: what the processes of one attempt may use."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError, RolloutError
from agentlightning_plugins.shared.sandbox import guard
from agentlightning_plugins.shared.sandbox.process import Tail, read_agent_file, run_group

logger = logging.getLogger("agentlightning")
Network = Literal["host", "gateway"]


@dataclass(frozen=True)
class Job:
    """A command to run."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    cwd: str | None
    """Working directory; None is the current one."""
    folder: Path
    """The attempt's own folder, with its home and its workspace; it is removed when the attempt has ended."""
    stdin: Path
    stdout: Tail
    stderr: Tail
    kill_after_s: float
    """Seconds between SIGTERM and SIGKILL when the caller is cancelled."""


class Sandbox(Protocol):
    """Runs the command of an attempt within limits."""

    async def run(self, job: Job) -> int:
        """Runs a command, and returns its exit code: -n if signal n ended it. No process is left.

        Raises:
            RolloutError: the command cannot be started, or exceeded a limit.
        """
        ...


class SubprocessSandbox:
    """Limits of the operating system, for processes of the user who trains.

    On Linux, where namespaces are allowed, the processes of an attempt see only each other and end with it, whatever
    they do. They can still read and write the user's files. What this machine cannot enforce is logged once.
    """

    def __init__(
        self,
        *,
        memory_mb: int | None = None,
        processes: int = 512,
        open_files: int = 8192,
        disk_mb: int = 8192,
        network: Network = "host",
    ) -> None:
        """Sets the limits of each attempt.

        Args:
            memory_mb: MiB of resident memory of all processes; None means no limit. Needs namespaces.
            processes: number of processes at the same time. Needs namespaces.
            open_files: number of open files of each process.
            disk_mb: MiB of files in the attempt's folder, which has its home, its temporary files and its workspace;
                also the size of any file elsewhere.
            network: ``host``, or ``gateway``: no network but the model endpoint, which must be on this machine. Needs
                namespaces.

        Raises:
            ConfigError: a limit is invalid.
        """
        limits = {"memory_mb": memory_mb, "processes": processes, "open_files": open_files, "disk_mb": disk_mb}
        check_limits(limits)
        if network not in get_args(Network):
            raise ConfigError(f"network = {network!r}: give one of: {', '.join(get_args(Network))}")
        self._limits = limits
        self._network = network

    async def run(self, job: Job) -> int:
        program = job.arguments[0]
        if "/" not in program and shutil.which(program, path=job.env.get("PATH")) is None:
            raise RolloutError(f"the command {program!r} cannot be started: PATH has no such program")
        namespaces = find_namespaces()
        if not namespaces:
            self._require_no_namespace()
        reason = job.folder / "exceeded"
        net = ["--net"] if self._network == "gateway" else []
        async with way_to_gateway(job, self._network) as (port, path):
            settings = {
                **self._limits,
                "folders": [str(job.folder)],
                "reason": str(reason),
                "has_own_network": bool(net),
                "port": port,
                "socket": path,
            }
            start = [*namespaces, *net, "--"] if namespaces else []
            code = await run_group(
                [*start, sys.executable, "-I", "-S", guard.__file__, json.dumps(settings), *job.arguments],
                env=job.env,
                cwd=job.cwd,
                stdin=job.stdin,
                stdout=job.stdout,
                stderr=job.stderr,
                kill_after_s=job.kill_after_s,
                daemons_of=None if namespaces else job.env.get("AGL_ATTEMPT_ID"),
            )
        if exceeded := read_agent_file(reason):
            raise RolloutError(f"the command {Path(job.arguments[0]).name!r} was ended: it used {exceeded}")
        return 128 - code if code > 128 else code

    def _require_no_namespace(self) -> None:
        if self._network == "gateway":
            raise ConfigError("network = 'gateway': this machine allows no namespaces (`unshare --user` fails)")
        _log_once(
            "this machine allows no namespaces: commands are limited in open files and the size of files, but neither "
            "in processes nor in memory"
        )


def check_limits(limits: Mapping[str, float | None]) -> None:
    """Checks numbers by name; None means no limit.

    Raises:
        ConfigError: one is not above 0.
    """
    for name, value in limits.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{name} = {value}: give a number above 0")


@asynccontextmanager
async def way_to_gateway(job: Job, network: str) -> AsyncIterator[tuple[int, str]]:
    """Yields the port of the model endpoint and a Unix socket that leads there; 0 without such a way."""
    url = urlsplit(job.env.get("OPENAI_BASE_URL", ""))
    if network != "gateway" or not url.hostname:  # a reward command has no model
        yield 0, ""
        return
    if url.hostname not in ("127.0.0.1", "localhost") or url.port is None:
        raise ConfigError(f"network = 'gateway': the model endpoint is {url.geturl()!r}, not a gateway on this machine")
    path = str(job.folder / "gateway")
    connect = functools.partial(asyncio.open_connection, "127.0.0.1", url.port)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await connect()
        with contextlib.closing(writer), contextlib.closing(far_writer), contextlib.suppress(OSError):
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    server = await asyncio.start_unix_server(relay, path)
    try:
        yield url.port, path
    finally:
        server.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


@functools.cache
def find_namespaces() -> list[str]:
    """Returns the start of a command line that gives a program namespaces of its own; empty where that is forbidden."""
    own = ["--pid", "--fork", "--kill-child", "--mount-proc"]
    for user in ([], ["--user", "--map-current-user"]):  # as root, packages can be installed only without the second
        try:
            command = ["unshare", *user, *own, "--net", "true"]
            done = subprocess.run(command, capture_output=True, check=False)
        except OSError:  # there is no unshare
            return []
        if done.returncode == 0:
            return ["unshare", *user, *own]
    return []


@functools.cache
def _log_once(text: str) -> None:
    logger.warning("%s", text)
