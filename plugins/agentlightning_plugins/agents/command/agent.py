"""The agent that runs a command for each task."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeGuard, get_args

from agentlightning import semconv
from agentlightning.emitter import emit_feedback, emit_reward
from agentlightning.errors import ConfigError, RolloutError
from agentlightning.litagent import LitAgent, RewardFunction, read_rating
from agentlightning.plugin.registry import get_manager
from agentlightning.resources import NamedResources, PromptTemplate, ProxyLLM
from agentlightning.run.thread import run_in_thread
from agentlightning.tracer.tracer import OpenSpan, get_active_trace, get_active_tracer, running
from agentlightning.types import Rollout
from agentlightning_plugins.agents.command.environment import build_environment
from agentlightning_plugins.agents.command.workspace import State, Workspace, copy, restore
from agentlightning_plugins.shared.presets.preset import load_preset
from agentlightning_plugins.shared.sandbox.process import Tail, hide_process, read_agent_file
from agentlightning_plugins.shared.sandbox.sandbox import Job, Sandbox

logger = logging.getLogger("agentlightning")
RewardSource: TypeAlias = Literal["stdout", "exit_code", "file"]
TaskVia: TypeAlias = Literal["argument", "stdin", "env", "file"]

_CLEANER: Final = ThreadPoolExecutor(2, thread_name_prefix="agl-cleanup")
_PLACEHOLDER: Final = "{task}"
_SHOWN_CHARS: Final = 2000
"""Characters from the end of stderr that an error quotes."""
_SECRETS: Final = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AGL_TOKEN")
_MIN_SECRET_CHARS: Final = 8
"""Shorter values are placeholders, and may occur in ordinary words."""


@functools.cache
def _warn_of_api(name: str, api: str) -> None:
    logger.warning(
        "%s calls its model with the API %r, which the endpoint must have, and the calls are not recorded: there is no "
        "gateway, which translates and records them; `agl new agent --preset` shows its settings", name, api,
    )  # fmt: skip


class CommandAgent(LitAgent[Any]):
    """A command line in any language as an agent, such as a coding agent, with one process group per attempt.

    The command finds its model in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL`` (and the same for
    Anthropic), prompts in ``AGL_PROMPT_<NAME>``, all resources in the JSON file ``AGL_RESOURCES_FILE``, and its attempt
    in ``AGL_ROLLOUT_ID``, ``AGL_ATTEMPT_ID`` and ``TRACEPARENT``. Apart from ``env``, it gets only the variables that
    programs need to run (``environment.INHERITED``) and those that ``inherit_env`` names, so that no key leaks.

    The output is recorded on a span of the attempt, with the keys redacted, and the changes to the workspace as a diff.
    An exit code other than 0 fails the attempt with the end of stderr. On a timeout or a cancellation the whole group
    is terminated, then killed.
    """

    returns_output: ClassVar[bool] = True

    def __init__(
        self,
        argv: Sequence[str] | None = None,
        reward: RewardFunction | RewardSource | Sequence[str] | None = None,
        *,
        preset: str | None = None,
        prompt: str | None = None,
        workspace: str | os.PathLike[str] | None = None,
        reset: Sequence[str] | None = None,
        restore: Sequence[str] = (),
        keep: str | os.PathLike[str] | None = None,
        home: str | os.PathLike[str] = "fresh",
        task_via: TaskVia | None = None,
        env: Mapping[str, str] | None = None,
        inherit_env: Sequence[str] = (),
        cwd: str | os.PathLike[str] | None = None,
        llm: str | None = None,
        name: str | None = None,
        sandbox: Sandbox | str | Mapping[str, Any] | None = None,
        kill_after_s: float = 5.0,
        max_output_bytes: int = 256 * 1024,
    ) -> None:
        """Describes the command.

        Args:
            argv: program and arguments, run without a shell. ``{task}`` in an argument is replaced by the task, and
                ``{task_file}`` by the path of a file with it. Default: the command of the preset.
            reward: a function, a command, or a place. ``reward(task, output, rollout)`` gets stdout as the output, and
                the path of the attempt's copy if it has a parameter ``workspace``. A command runs in the workspace when
                the agent has ended, without the model's variables; it gives the number, or the JSON object of numbers,
                on its last line if there is one, else 1 for exit code 0, and 0 for any other exit code. Places are
                ``stdout``, the last line; ``file``, the file named by ``AGL_REWARD_FILE``; ``exit_code``, where 0 is a
                reward of 1 and 1 a reward of 0. In an object, the key ``reward`` is the final reward, and the
                key ``feedback`` may be a text. None: the command reports spans to the store, or the trainer has a
                reward function.
            preset: name of a known coding agent, such as ``codex``, or the path of a YAML file like those in
                ``shared/presets``.
            prompt: template of the text that the command gets as its task, with the fields of the task as variables (a
                task that is a text is ``{task}``); it is the first version of the resource ``prompt``, which algorithms
                tune.
            workspace: each attempt works in its own copy of this folder, or of the commit ``git+URL@REF``. ``{name}``
                is replaced by that field of the task.
            reset: command that prepares each workspace before the agent starts, without the model's variables.
            restore: patterns of files, such as ``tests/*``, that are put back before a reward command runs.
            keep: folder that gets each attempt's workspace afterwards, named by the attempt.
            home: ``fresh``: an empty home folder for each attempt; ``inherit``: the user's; or a folder to copy.
            task_via: how the task is passed: ``argument``, in place of ``{task}`` or at the end; ``stdin``; ``env``, in
                ``AGL_TASK``; ``file``, at the path in ``AGL_TASK_FILE``. Text is passed unchanged, anything else as
                JSON. Default: by the placeholder in the command, else ``stdin``.
            env: further variables; they take precedence.
            inherit_env: names or patterns (``AWS_*``) of variables to inherit; ``*`` inherits all.
            cwd: working directory, if there is no workspace; default is the current one.
            llm: name of the model among the resources; needed if there are several models and none is named ``llm``.
            name: name of the agent in traces; default is the last part of the program's path.
            sandbox: the limits of an attempt: a component of the kind ``sandbox``, with settings. Default:
                ``subprocess``.
            kill_after_s: seconds between SIGTERM and SIGKILL.
            max_output_bytes: how much of the end of stdout and of stderr is kept.

        Raises:
            ConfigError: an argument is invalid.
        """
        self._preset = None if preset is None else load_preset(preset)
        command = argv if argv is not None or self._preset is None else self._preset.command
        if not _is_command(command):
            raise ConfigError(f"argv = {argv!r}: give a list of strings, as in ['python', 'my_agent.py'], or a preset")
        if not (reward is None or callable(reward) or reward in get_args(RewardSource) or _is_command(reward)):
            places = ", ".join(get_args(RewardSource))
            raise ConfigError(
                f"reward = {reward!r}: give a function, a command as a list of strings, or one of: {places}"
            )
        if reset is not None and not _is_command(reset):
            raise ConfigError(f"reset = {reset!r}: give a list of strings, as in ['make', 'clean']")
        needs = {"reset": reset, "restore": restore, "keep": keep, "a reward command": _is_command(reward)}
        if workspace is None and (wrong := [what for what, value in needs.items() if value]):
            raise ConfigError(f"{wrong[0]} needs a workspace")
        if workspace is not None and cwd is not None:
            raise ConfigError(f"cwd = {cwd!r}: the command works in its copy of the workspace; leave one of them out")
        found = [via for via, mark in _MARKS.items() if any(mark in part for part in command)]
        task_via = task_via or (found[0] if found else "stdin")
        if task_via not in get_args(TaskVia):
            raise ConfigError(f"task_via = {task_via!r}: give one of: {', '.join(get_args(TaskVia))}")
        if wrong := [via for via in found if via != task_via]:
            raise ConfigError(
                f"task_via = {task_via!r}, but the command has a {_MARKS[wrong[0]]}; leave one of them out"
            )
        if max_output_bytes < 1 or kill_after_s < 0:
            raise ConfigError(f"max_output_bytes = {max_output_bytes}, kill_after_s = {kill_after_s}: too small")
        self.command = [*command, _PLACEHOLDER] if task_via == "argument" and not found else list(command)
        self.name = name or (Path(command[0]).name if argv is not None or preset is None else Path(preset).stem)
        self._reward = reward
        ignored = self._preset.ignore if self._preset else ()
        self._workspace = None if workspace is None else Workspace(os.fspath(workspace), ignored)
        self._prompt = None if prompt is None else PromptTemplate(template=prompt)
        self._reset = reset
        self._restore = tuple(restore)
        self._keep = None if keep is None else Path(keep)
        self._home = home if home in ("fresh", "inherit") else Path(home).expanduser()
        self._task_via = task_via
        self._env = {**(self._preset.env if self._preset else {}), **(env or {})}
        self._inherit_env = tuple(inherit_env)
        self._cwd = None if cwd is None else os.fspath(cwd)
        self._llm = llm
        sandbox = sandbox or "subprocess"
        self._sandbox = get_manager().create("sandbox", sandbox) if isinstance(sandbox, (str, Mapping)) else sandbox
        self._kill_after_s = kill_after_s
        self._max_output_bytes = max_output_bytes

    def __repr__(self) -> str:
        return f"<CommandAgent {self.name}>"

    def __getstate__(self) -> dict[str, Any]:
        """Hides this process first: pickling sends the agent to runner processes, whose commands could read it."""
        hide_process()
        return self.__dict__

    def is_async(self) -> bool:
        return True

    def describe_program(self) -> str:
        """Returns the program and, for a preset, its release and what its first request needs.

        Raises:
            ConfigError: the program, or the Node.js that it needs, is not installed.
        """
        if image := getattr(self._sandbox, "image", None):
            return f"{self.command[0]} of the image {image}"
        program = shutil.which(self.command[0])
        if program is None:
            install = f" Install it with: {self._preset.install}" if self._preset and self._preset.install else ""
            raise ConfigError(f"PATH has no program {self.command[0]!r}.{install}")
        if self._preset is None:
            return program
        if self._preset.node is not None:
            found = _ask_version("node")
            if not found or int(found.lstrip("v").partition(".")[0]) < self._preset.node:
                raise ConfigError(f"{self.name} needs Node.js {self._preset.node}; PATH has {found or 'none'}")
        size = f"; its first request has about {self._preset.prompt_kb:g} kB" if self._preset.prompt_kb else ""
        return f"{program} {_ask_version(program)}, tried with {self._preset.tested}{size}"

    def initial_prompts(self) -> Mapping[str, PromptTemplate]:
        return {} if self._prompt is None else {"prompt": self._prompt}

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        """Runs the command once, emits its reward if ``reward`` is set, and returns stdout.

        Raises:
            RolloutError: the command cannot be started, exceeds a limit, fails, or gives no reward.
        """
        hide_process()
        temporary = tempfile.TemporaryDirectory(prefix="agl-", ignore_cleanup_errors=True)
        try:
            place = await self._prepare(task, resources, rollout, Path(temporary.name))
            try:
                output, exit_code = await self._run(place)
                await self._rate(place, output, exit_code, rollout)
            finally:
                if self._keep is not None and place.workspace is not None:
                    self._keep.mkdir(parents=True, exist_ok=True)
                    name = getattr(getattr(rollout, "attempt", None), "attempt_id", rollout.rollout_id)
                    await run_in_thread(functools.partial(shutil.move, place.workspace, self._keep / name), name="keep")
            return output
        finally:  # a workspace may have many files; no cancellation stops this thread
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(_CLEANER, temporary.cleanup))

    async def _prepare(self, task: Any, resources: NamedResources, rollout: Rollout, folder: Path) -> _Workplace:
        """Makes what the command finds: its task, its environment, its home and its workspace."""
        text = task if isinstance(task, str) else json.dumps(task, ensure_ascii=False)
        if self._prompt is not None:
            prompt = resources.get("prompt", self._prompt)
            if not isinstance(prompt, PromptTemplate):
                raise ConfigError(
                    f"the resource 'prompt' is a {type(prompt).__name__}, and the command needs a template"
                )
            text = prompt.format(**(task if isinstance(task, Mapping) else {"task": text}))
        (folder / "task").write_text(text, encoding="utf-8")
        trace = get_active_trace()
        store = None if trace is None else trace.store
        env = build_environment(resources, rollout, folder, inherit=self._inherit_env, llm=self._llm, store=store)
        secrets = {env[name] for name in _SECRETS if len(env.get(name, "")) >= _MIN_SECRET_CHARS}
        env |= {"AGL_TASK": text, "AGL_TASK_INPUT": json.dumps(task)} if self._task_via == "env" else {}
        env |= {"AGL_TASK_FILE": str(folder / "task")} if self._task_via == "file" else {}
        preset = self._preset
        if preset and preset.api != "chat" and not any(isinstance(each, ProxyLLM) for each in resources.values()):
            _warn_of_api(self.name, preset.api)
        fill = functools.partial(preset.fill, variables=dict(env)) if preset else str
        temporary = folder / "tmp"
        temporary.mkdir()
        env["TMPDIR"] = str(temporary)  # attempts have the same process ids, which names of temporary files may contain
        if self._home != "inherit":
            home = folder / "home"
            home.mkdir()
            if isinstance(self._home, Path):
                await run_in_thread(functools.partial(copy, self._home, home), name="copy-home")
            for path, content in (preset.home if preset else {}).items():
                (home / path).parent.mkdir(parents=True, exist_ok=True)
                (home / path).write_text(fill(content), encoding="utf-8")
            env["HOME"] = str(home)
        place = _Workplace(task, text, folder, env, secrets)
        if self._workspace is not None:
            place.workspace = folder / "workspace"
            place.workspace.mkdir()
            make = functools.partial(self._workspace.make, task, place.workspace)
            place.source, place.before = await run_in_thread(make, name="copy-workspace")
            if self._reset is not None:
                code, said = await self._run_own(place, self._reset)
                if code:
                    raise RolloutError(f"the command reset exited with code {code}: {said[-_SHOWN_CHARS:]}")
                place.before = self._workspace.read_state(place.workspace)
        env |= {name: fill(value) for name, value in self._env.items()}
        place.arguments = [
            fill(part).replace("{task_file}", str(folder / "task")).replace(_PLACEHOLDER, text) for part in self.command
        ]
        return place

    async def _run(self, place: _Workplace) -> tuple[str, int]:
        """Returns stdout and the exit code."""
        secrets = place.secrets
        stdout, stderr = Tail(self._max_output_bytes), Tail(self._max_output_bytes)
        with self._open_span(place.text) as span:
            exit_code: int | None = None
            try:
                has_stdin = self._task_via == "stdin"
                env = _trace_context() | place.env
                exit_code = await self._execute(place, place.arguments, env, stdout, stderr, has_stdin=has_stdin)
            finally:  # the output of a command that was stopped may tell why
                recorded = {
                    semconv.OPERATION_OUTPUT: _redact(stdout.text, secrets),
                    "agentlightning.command.stderr": _redact(stderr.text, secrets),
                    "agentlightning.command.dropped_bytes": stdout.dropped + stderr.dropped,
                    **({} if exit_code is None else {"agentlightning.command.exit_code": exit_code}),
                }
                if self._workspace is not None and place.source and place.workspace and exit_code is not None:
                    diff = functools.partial(self._workspace.diff, place.source, place.before, place.workspace)
                    text = await run_in_thread(diff, name="diff-workspace")
                    recorded["agentlightning.command.diff"] = _redact(text, secrets)
                if span is not None:
                    span.set_attributes(recorded)
            if exit_code not in ((0, 1) if self._reward == "exit_code" else (0,)):
                raise RolloutError(self._explain(exit_code, _redact(stderr.text, secrets)))
            if exit_code and (reason := _redact(stderr.text, secrets).strip()[-_SHOWN_CHARS:]):
                emit_feedback(reason)
        return stdout.text, exit_code

    async def _execute(
        self,
        place: _Workplace,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdout: Tail,
        stderr: Tail,
        *,
        has_stdin: bool = False,
    ) -> int:
        stdin = place.folder / "task" if has_stdin else Path(os.devnull)
        cwd = self._cwd if place.workspace is None else str(place.workspace)
        job = Job(arguments, env, cwd, place.folder, stdin, stdout, stderr, self._kill_after_s)
        return await self._sandbox.run(job)

    async def _run_own(self, place: _Workplace, arguments: Sequence[str]) -> tuple[int, str]:
        """Runs a command of the user in the workspace; returns its exit code and stdout, with stderr if it fails."""
        stdout, stderr = Tail(self._max_output_bytes), Tail(self._max_output_bytes)
        env = {name: value for name, value in place.env.items() if not name.startswith(_MODEL_VARIABLES)}
        exit_code = await self._execute(place, arguments, env, stdout, stderr)
        said = f"{stdout.text}\n{stderr.text}" if exit_code else stdout.text
        return exit_code, _redact(said, place.secrets).strip()

    async def _rate(self, place: _Workplace, output: str, exit_code: int, rollout: Rollout) -> None:
        """Emits the reward."""
        if callable(self._reward):
            more = {"workspace": place.workspace} if _takes_workspace(self._reward) else {}
            reward = self._reward(place.task, output, rollout, **more)
            rating = read_rating(await reward if inspect.isawaitable(reward) else reward, self._reward)
            emit_reward(rating)  # type: ignore[arg-type] # refuses None
        elif self._reward == "exit_code":
            emit_reward(1.0 - exit_code)
        elif self._reward == "file":
            self._emit_reward(read_agent_file(place.folder / "reward"), "the file AGL_REWARD_FILE", place.secrets)
        elif self._reward == "stdout":
            self._emit_reward(output.rstrip().rpartition("\n")[2], "the last line of its stdout", place.secrets)
        elif _is_command(self._reward):
            assert place.source is not None
            assert place.workspace is not None
            put_back = functools.partial(restore, place.source, place.workspace, self._restore)
            await run_in_thread(put_back, name="restore-workspace")
            code, said = await self._run_own(place, self._reward)
            last = said.rpartition("\n")[2]
            if code == 0 and _read_reward(last) is not None:
                self._emit_reward(last, "the last line of the reward command", place.secrets)
                return
            emit_reward(float(code == 0))
            if code:
                emit_feedback(said[-_SHOWN_CHARS:])

    def _open_span(self, text: str) -> contextlib.AbstractContextManager[OpenSpan | None]:
        """Opens the span of the command; yields None outside a rollout."""
        attributes = {
            semconv.GEN_AI_OPERATION_NAME: "invoke_agent",
            "gen_ai.agent.name": self.name,
            semconv.OPERATION_INPUT: text,
        }
        tracer = get_active_tracer()
        if tracer is None:
            return contextlib.nullcontext()
        return running(tracer.start_span(f"invoke_agent {self.name}", attributes))

    def _explain(self, exit_code: int, stderr: str) -> str:
        how = f"exited with code {exit_code}" if exit_code >= 0 else f"was ended by {_name_signal(-exit_code)}"
        end = stderr.rstrip()[-_SHOWN_CHARS:]
        return f"the command {self.name!r} {how}; its stderr " + (f"ends with:\n{end}" if end else "is empty")

    def _emit_reward(self, text: str, what: str, secrets: Collection[str]) -> None:
        """Emits the reward in a text: a number, or a JSON object of numbers and perhaps a text ``feedback``."""
        found = _read_reward(text)
        if found is None:
            shown = _redact(text.strip(), secrets)[:200]
            raise RolloutError(
                f"the command {self.name!r} gave no reward: {what} is {shown!r}, not a number and not a "
                'JSON object of numbers such as {"reward": 1.0}'
            )
        value, feedback = found
        if feedback:
            emit_feedback(_redact(feedback, secrets))
        if isinstance(value, dict):
            emit_reward(value, primary_key="reward")
        else:
            emit_reward(value)


@dataclass
class _Workplace:
    """The files, the variables and the arguments of one attempt."""

    task: Any
    text: str
    """The task as the command gets it."""
    folder: Path
    env: dict[str, str]
    secrets: Collection[str]
    """The keys that the command got."""
    arguments: Sequence[str] = ()
    workspace: Path | None = None
    source: Path | None = None
    """The folder that the workspace is a copy of."""
    before: State = field(default_factory=dict)
    """The files of the workspace before the command ran."""


_MODEL_VARIABLES: Final = ("OPENAI_", "ANTHROPIC_", "AGL_", "OTEL_", "TRACEPARENT")
_MARKS: Final[dict[TaskVia, str]] = {"argument": _PLACEHOLDER, "file": "{task_file}"}


def _takes_workspace(function: Callable[..., Any]) -> bool:
    try:
        return "workspace" in inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return False


def _ask_version(program: str) -> str:
    """Returns the first line that a program prints for ``--version``; empty if there is none."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]


def _is_command(value: object) -> TypeGuard[Sequence[str]]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return False
    return all(isinstance(part, str) for part in value)


def _read_reward(text: str) -> tuple[float | dict[str, float], str] | None:
    """Returns the reward, or rewards by name, in a text, and the feedback; None if there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    feedback = value.pop("feedback", "") if isinstance(value, dict) else ""
    feedback = feedback.strip() if isinstance(feedback, str) else ""
    if isinstance(value, dict):
        return (value, feedback) if "reward" in value and all(map(_is_number, value.values())) else None
    return (value, feedback) if _is_number(value) else None


def _redact(text: str, secrets: Collection[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        text = text.replace(secret, "***")
    return text


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _trace_context() -> dict[str, str]:
    """Returns the caller's W3C trace context as environment variables."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {name.upper(): value for name, value in carrier.items()}
