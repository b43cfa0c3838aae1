"""The sandbox ``docker``: the command of an attempt runs in a container."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError, RolloutError
from agentlightning.run.thread import run_in_thread
from agentlightning_plugins.agents.command.environment import INHERITED
from agentlightning_plugins.shared.sandbox import guard
from agentlightning_plugins.shared.sandbox.process import run_group
from agentlightning_plugins.shared.sandbox.sandbox import Job, check_limits, way_to_gateway

_FAILED: Final = 125
"""Exit code of ``docker run`` if there is no container."""
_GUARD: Final = "/agl-guard.py"
_MEASURE_S: Final = 1.0
_MESSAGES: Final = ("docker:", "Error:")
"""How ``docker`` and ``podman`` begin their own messages."""
_NOT_STARTED: Final = (126, 127)
"""Exit codes if the program cannot be started, and of shells for one that they cannot start."""
_SHOWN_CHARS: Final = 2000


class DockerSandbox:
    """Containers of ``docker``, or of a program with the same arguments, such as ``podman``.

    A container sees the attempt's folder, at the path that it has outside, and the files of its image, which it can
    only read. It gets the variables of the attempt, but not those that describe this machine, such as ``PATH``.
    """

    def __init__(
        self,
        *,
        image: str,
        memory_mb: int = 4096,
        cpus: float = 2,
        processes: int = 512,
        open_files: int = 8192,
        disk_mb: int = 8192,
        network: str = "host",
        writable: bool = False,
        options: Sequence[str] = (),
        program: str = "docker",
    ) -> None:
        """Sets the limits of each attempt, and asks the daemon for the image.

        Args:
            image: the image, which must be on the machine of each runner.
            memory_mb: MiB of memory, without swap.
            cpus: number of cores.
            processes: number of processes and threads at the same time.
            open_files: number of open files of each process.
            disk_mb: MiB of files in the attempt's folder.
            network: ``host``; ``gateway``: no network but the model endpoint, which must be on this machine, through
                the ``python3`` of the image; ``none``; or a network of docker.
            writable: whether the command may also change files of the image, which no limit covers.
            options: further arguments of ``docker run``, such as ``--gpus=all``.
            program: ``docker``, ``podman``, or a path.

        Raises:
            ConfigError: a limit is invalid, or program, daemon or image is missing.
        """
        self._limits = {"memory_mb": memory_mb, "processes": processes, "open_files": open_files, "disk_mb": disk_mb}
        check_limits({**self._limits, "cpus": cpus})
        self.image = image
        self._program = program
        self._network = network
        is_rootless_podman = Path(program).name == "podman" and os.getuid() != 0
        self._options = [
            *("--init", "--interactive", "--rm", "--pull=never", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *(f"--memory={memory_mb}m", f"--memory-swap={memory_mb}m", f"--cpus={cpus}", f"--pids-limit={processes}"),
            *(f"--ulimit=nofile={open_files}", "--ulimit=core=0", f"--user={os.getuid()}:{os.getgid()}"),
            f"--network={'none' if network == 'gateway' else network}",
            *([] if writable else ["--read-only", "--tmpfs=/tmp"]),
            *(["--userns=keep-id"] if is_rootless_podman else []),
            *options,
        ]
        if problem := _call(program, "image", "inspect", "--format={{.Id}}", image):
            raise ConfigError(
                f"the sandbox docker needs the image {image!r} here: {problem[:_SHOWN_CHARS].rstrip('.')}. Start the "
                f"daemon, or get the image: {program} pull {image}"
            )

    async def run(self, job: Job) -> int:
        name = f"{job.folder.name}-{secrets.token_hex(4)}"
        variables, env = _pass_variables(job.env)
        place = [f"--volume={job.folder}:{job.folder}", *([f"--workdir={job.cwd}"] if job.cwd else [])]
        async with way_to_gateway(job, self._network) as (port, path):
            command = [self.image, *job.arguments]
            if port:
                place.append(f"--volume={guard.__file__}:{_GUARD}:ro")
                settings = {**self._limits, "folders": [], "has_own_network": False, "port": port, "socket": path}
                command[1:1] = ["python3", "-I", "-S", _GUARD, json.dumps(settings)]
            full = asyncio.Event()
            watching = asyncio.create_task(self._watch(job.folder, name, full))
            code = -1
            try:
                code = await run_group(
                    [self._program, "run", f"--name={name}", *self._options, *variables, *place, *command],
                    env=env,
                    cwd=None,
                    stdin=job.stdin,
                    stdout=job.stdout,
                    stderr=job.stderr,
                    kill_after_s=job.kill_after_s,
                )
            finally:
                watching.cancel()
                if code < 0:  # the container outlives the program that started it
                    await asyncio.shield(asyncio.create_task(self._remove(name)))
        program = Path(job.arguments[0]).name
        if full.is_set():
            raise RolloutError(
                f"the command {program!r} was ended: it used more than {self._limits['disk_mb']} MiB of files"
            )
        if code == _FAILED or (code in _NOT_STARTED and job.stderr.text.startswith(_MESSAGES)):
            raise RolloutError(
                f"the container of {program!r} cannot be started: {job.stderr.text.strip()[-_SHOWN_CHARS:]}"
            )
        if code == 128 + signal.SIGKILL:
            most = self._limits["memory_mb"]
            raise RolloutError(f"the command {program!r} was ended by SIGKILL, as for more than {most} MiB of memory")
        return 128 - code if code > 128 else code

    async def _watch(self, folder: Path, name: str, full: asyncio.Event) -> None:
        """Sets ``full`` and ends the container once the folder has too many bytes."""
        most = self._limits["disk_mb"] * 2**20
        measure = functools.partial(guard.measure_folder, str(folder))
        while True:
            if await run_in_thread(measure, name="measure") > most:
                break
            await asyncio.sleep(_MEASURE_S)
        full.set()
        await self._remove(name)

    async def _remove(self, name: str) -> None:
        await run_in_thread(functools.partial(_call, self._program, "rm", "--force", name), name="remove-container")


def _pass_variables(job_env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns options that name the variables of a container, and the environment of ``docker`` with their values.

    So no key is in the list of processes. What describes this machine and is unchanged is left out.
    """
    options: list[str] = []
    env = dict(os.environ)
    for name, value in job_env.items():
        if not any(fnmatchcase(name, pattern) for pattern in INHERITED):
            options.append(f"--env={name}")
            env[name] = value
        elif os.environ.get(name) != value:  # docker needs its own HOME and PATH
            options.append(f"--env={name}={value}")
    return options, env


def _call(*command: str) -> str:
    """Runs ``docker``; returns what it says if it fails, else an empty text."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
