"""``harbor: DIR``: task folders of Harbor, played in the sandbox of the operating system."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from agentlightning.environment import Environment, StepResult
from agentlightning.errors import ConfigError, RolloutError, suggest
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.shared.sandbox.process import Tail, read_agent_file
from agentlightning_plugins.shared.sandbox.sandbox import Job, SubprocessSandbox

logger = logging.getLogger("agentlightning")
_NAMESPACE: Final = ("unshare", "--user", "--map-root-user", "--mount")
_SYSTEM: Final = frozenset("bin boot dev etc lib lib64 logs proc root run sbin sys tests tmp usr var".split())
"""Folders of / that no task may replace by its own."""
_FILES: Final = ("instruction.md", "tests/test.sh")
_ROOT: Final = """
set -e
root=$1 hidden=$2 cwd=$3
shift 3
mount -t tmpfs none "$root"
for each in /*; do
    if [ -L "$each" ]; then cp -P "$each" "$root$each"
    elif [ -d "$each" ]; then
        mkdir "$root$each"
        mount --rbind "$each" "$root$each"
        case $each in /dev | /proc | /sys) ;; *) mount -o remount,bind,ro "$root$each" 2>/dev/null || : ;; esac
    fi
done
[ ! -d "$root$hidden" ] || mount -t tmpfs none "$root$hidden"
while [ "$1" != -- ]; do
    mkdir -p "$root$1"
    mount --bind "$2" "$root$1"
    shift 2
done
shift
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$cwd" "$@"
"""
"""Runs a command under its own root: the machine's folders, read-only, with the episode's mounted over them."""


@hookimpl
def components() -> list[Component]:
    target = f"{__name__}:HarborEnvironment"
    return [Component("environment", "harbor", target, extra="openai", summary="task folders of Harbor")]


@dataclass
class _Task:
    """The contents of a task folder."""

    folder: Path
    config: dict[str, Any]
    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    files: list[tuple[Path, str]] = field(default_factory=list)
    """Files and folders of the image, each with its absolute path there."""
    lacks: list[str] = field(default_factory=list)
    """Parts of the task that only a container could give."""

    @property
    def is_whole(self) -> bool:
        return all((self.folder / name).is_file() for name in _FILES)

    @property
    def places(self) -> set[str]:
        """The folders of / that belong to the episode."""
        return {"app", PurePosixPath(self.workdir).parts[1]}


class HarborEnvironment(Environment):
    """Tasks of Harbor: the model runs commands with the tool ``shell``, and the task's tests give the reward.

    The commands see the task's ``/app``, or other working directory, ``/logs`` and ``/tmp``, and the folders of the
    machine, read-only where it allows that. The tests run when the model has ended; it never sees them or the solution.
    """

    timeout_s = 600.0

    def __init__(
        self, address: str, run_as_is: bool = False, command_s: float = 120.0, output_chars: int = 8000
    ) -> None:
        """Reads the tasks.

        Args:
            address: a task folder, or a folder with task folders.
            run_as_is: run also tasks that need a container, for example because their Dockerfile installs packages.
            command_s: seconds that a command of the model may take.
            output_chars: characters from the end of a command's output that the model sees.

        Raises:
            ConfigError: there is no task that can run, or the machine allows no mount namespaces.
        """
        root = Path(address).expanduser().resolve()
        folders = [root] if (root / "task.toml").is_file() else sorted(each.parent for each in root.glob("*/task.toml"))
        if not folders:
            raise ConfigError(f"harbor = {address!r}: neither it nor a folder in it has a file task.toml")
        if command_s <= 0 or output_chars <= 0:
            raise ConfigError(f"command_s = {command_s}, output_chars = {output_chars}: give numbers above 0")
        if not _has_mounts():
            raise ConfigError(
                f"harbor = {address!r}: this machine allows no mount namespaces (`{' '.join(_NAMESPACE)} true` fails), "
                "so the tasks' paths /app, /tests and /logs cannot be had; allow user namespaces"
            )
        self.address, self.command_s, self.output_chars = str(root), command_s, output_chars
        read = [_read_task(folder) for folder in folders]
        self._tasks = {task.folder.name: task for task in read if task.is_whole and (run_as_is or not task.lacks)}
        logger.warning("harbor: no image is built: the tasks of %s use the programs of this machine", self.address)
        for task in read:
            if task.lacks:
                known = "runs as it is" if task.folder.name in self._tasks else "is skipped"
                logger.warning("harbor: %s %s: it needs %s", task.folder.name, known, "; ".join(task.lacks))
        if not self._tasks:
            raise ConfigError(
                f"harbor = {address!r}: every task needs what is not here, such as {read[0].lacks[0]!r}; with "
                "run_as_is: true, tasks run without their image"
            )

    def tasks(self, split: Literal["train", "val"]) -> list[dict[str, str]] | None:
        return [{"task": name} for name in self._tasks] if split == "train" else None

    def reset(self, task: Any, seed: int) -> str:
        name = task.get("task") if isinstance(task, Mapping) else task
        if name not in self._tasks:
            hint = suggest(str(name), self._tasks)
            raise ConfigError(f"{self.address} has no task {name!r} that can run.{hint} Give {{'task': NAME}}")
        self._task = self._tasks[name]
        self._folder = Path(tempfile.mkdtemp(prefix="agl-harbor-"))
        for place in (*self._task.places, "root", "logs/agent", "logs/verifier", "tmp"):
            (self._folder / place).mkdir(parents=True, exist_ok=True)
        for source, target in self._task.files:
            _copy(source, self._folder / target.lstrip("/"))
        (self._folder / self._task.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
        return (self._task.folder / "instruction.md").read_text(encoding="utf-8")

    def tools(self) -> Sequence[Mapping[str, Any]]:
        parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
        description = f"Runs a command with bash in {self._task.workdir}; returns the end of its output."
        return [{"name": "shell", "description": description, "parameters": parameters}]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        command = arguments.get("command")
        if not isinstance(command, str):
            return "error: give the argument command, a text"
        try:
            code, output = await self._run(["bash", "-c", command], "logs", {}, self.command_s)
        except TimeoutError:
            return f"error: the command took longer than {self.command_s:g} s, and was ended"
        except RolloutError as error:  # it exceeded a limit
            return f"error: {error}"
        return output if code == 0 else f"{output}\n(exit code {code})".lstrip()

    async def reward(self, task: Any, output: str) -> float:
        """Runs the tests, in folders ``/tests`` and ``/logs`` that the model had no access to.

        Raises:
            RolloutError: the tests took too long, or wrote no reward.
        """
        verifier = self._task.config.get("verifier", {})
        shutil.copytree(self._task.folder / "tests", self._folder / "tests")
        logs = self._folder / "graded" / "verifier"
        logs.mkdir(parents=True)
        limit = float(verifier.get("timeout_sec", self.timeout_s))
        env = {key: os.path.expandvars(str(value)) for key, value in verifier.get("env", {}).items()}
        try:
            code, said = await self._run(["bash", "/tests/test.sh"], "graded", env, limit)
        except TimeoutError:
            raise RolloutError(f"the tests of {self._task.folder.name} took longer than {limit:g} s") from None
        if text := read_agent_file(logs / "reward.txt").strip():
            return _read_number(text, "reward.txt")
        if text := read_agent_file(logs / "reward.json").strip():
            return _read_rewards(text)
        raise RolloutError(
            f"the tests of {self._task.folder.name} wrote neither /logs/verifier/reward.txt nor reward.json; they "
            f"ended with exit code {code} and the output:\n{said}"
        )

    def close(self) -> None:
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _run(self, command: Sequence[str], logs: str, env: Mapping[str, str], limit_s: float) -> tuple[int, str]:
        """Runs a command under the root of the episode; returns its exit code and the end of its output."""
        machine = self._task.config.get("environment", {})
        is_offline = not machine.get("allow_internet", True) or machine.get("network_mode", "public") != "public"
        sandbox = SubprocessSandbox(memory_mb=machine.get("memory_mb"), network="gateway" if is_offline else "host")
        places = {f"/{name}": name for name in (*self._task.places, "tmp")} | {"/logs": logs}
        if logs == "graded":
            places["/tests"] = "tests"
        binds = [part for path, name in places.items() for part in (path, str(self._folder / name))]
        start = [*_NAMESPACE, "sh", "-c", _ROOT, "sh", str(self._folder / "root"), self.address, self._task.workdir]
        known = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108 the episode's own
        stdout, stderr = Tail(4 * self.output_chars), Tail(4 * self.output_chars)
        async with asyncio.timeout(limit_s):
            job = Job(
                [*start, *binds, "--", *command], known | self._task.env | dict(env), None, self._folder,
                Path(os.devnull), stdout, stderr, 1.0,
            )  # fmt: skip
            code = await sandbox.run(job)
        return code, f"{stdout.text}{stderr.text}".strip()[-self.output_chars :]


@functools.cache
def _has_mounts() -> bool:
    try:
        command = [*_NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]  # in a namespace of its own
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # there is no unshare
        return False


def _read_task(folder: Path) -> _Task:
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder / 'task.toml'} cannot be read: {error}") from error
    task = _Task(folder, config)
    if not task.is_whole:
        task.lacks.append("a run in steps" if (folder / "steps").is_dir() else f"the files {' and '.join(_FILES)}")
    if config.get("verifier", {}).get("environment_mode", "shared") != "shared":
        task.lacks.append("a separate container for its tests")
    if (folder / "environment" / "docker-compose.yaml").exists():
        task.lacks.append("docker-compose.yaml")
    dockerfile = folder / "environment" / "Dockerfile"
    if dockerfile.is_file():
        text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in filter(None, map(str.strip, text.splitlines())):
            if not line.startswith("#") and not _follow(task, line):
                task.lacks.append(f"Dockerfile: {line:.80}")
    elif "docker_image" in config.get("environment", {}):
        task.lacks.append(f"docker_image {config['environment']['docker_image']}")
    return task


def _follow(task: _Task, line: str) -> bool:
    """Does what an instruction of a Dockerfile says; returns False if that needs an image."""
    instruction, _, rest = line.partition(" ")
    if "$" in rest:
        return False
    try:
        words = json.loads(rest) if rest.lstrip().startswith("[") else shlex.split(rest)
    except ValueError:
        return False
    match instruction.upper(), words:
        case "FROM", _:
            return True  # the programs of this machine take the place of the image's
        case "WORKDIR", [path]:
            workdir = os.path.normpath(PurePosixPath(task.workdir, path))
            task.workdir = workdir if _is_own(workdir) else task.workdir
            return _is_own(workdir)
        case "ENV", [*pairs] if all("=" in pair for pair in pairs):
            task.env |= dict(pair.split("=", 1) for pair in pairs)
            return True
        case "COPY", [*sources, target] if sources and not any(each.startswith("--") for each in words):
            path = os.path.normpath(PurePosixPath(task.workdir, target))
            context = task.folder / "environment"
            if not _is_own(path) or PurePosixPath(path).parts[1] not in task.places:
                return False
            for source in sources:
                found = (context / source.lstrip("/")).resolve()
                if not found.is_relative_to(context) or not found.exists():
                    return False
                into = len(sources) > 1 or target.endswith(("/", ".")) or path == task.workdir
                task.files.append((found, f"{path}/{found.name}" if found.is_file() and into else path))
            return True
        case (("CMD" | "ENTRYPOINT" | "LABEL" | "EXPOSE"), _):
            return True
    return False


def _is_own(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return len(parts) > 1 and parts[1] not in _SYSTEM


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _read_number(text: Any, where: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise RolloutError(f"the tests wrote {str(text)[:100]!r} to {where}; a number is needed") from None


def _read_rewards(text: str) -> float:
    """Returns the number ``reward`` of an object, or its only number."""
    try:
        rewards = json.loads(text)
    except ValueError as error:
        raise RolloutError(f"the tests wrote no JSON to reward.json: {error}") from None
    if not isinstance(rewards, dict) or ("reward" not in rewards and len(rewards) != 1):
        raise RolloutError(f"reward.json has {text[:200]}; an object with the key reward, or a single key, is needed")
    return _read_number(rewards.get("reward", next(iter(rewards.values()))), "reward.json")
