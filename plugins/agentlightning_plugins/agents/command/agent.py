"""The agent that runs a command for each task."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

from agentlightning import semconv
from agentlightning.emitter import emit_feedback, emit_reward
from agentlightning.errors import ConfigError, RolloutError
from agentlightning.litagent import LitAgent, RewardFunction, read_rating
from agentlightning.resources import NamedResources
from agentlightning.tracer.tracer import OpenSpan, get_active_trace, get_active_tracer, running
from agentlightning.types import Rollout
from agentlightning_plugins.agents.command.environment import build_environment
from agentlightning_plugins.agents.command.process import Tail, hide_process, read_agent_file, run_group

RewardSource: TypeAlias = Literal["stdout", "exit_code", "file"]
TaskVia: TypeAlias = Literal["argument", "stdin", "env"]

_PLACEHOLDER: Final = "{task}"
_SHOWN_CHARS: Final = 2000
"""Characters from the end of stderr that an error quotes."""
_SECRETS: Final = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AGL_TOKEN")
_MIN_SECRET_CHARS: Final = 8
"""Shorter values are placeholders, and may occur in ordinary words."""


class CommandAgent(LitAgent[Any]):
    """A command line in any language as an agent, with one process group per attempt.

    The command finds its model in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL`` (and the same for
    Anthropic), prompts in ``AGL_PROMPT_<NAME>``, all resources in the JSON file ``AGL_RESOURCES_FILE``, and its attempt
    in ``AGL_ROLLOUT_ID``, ``AGL_ATTEMPT_ID`` and ``TRACEPARENT``. Apart from ``env``, it gets only the variables that
    programs need to run (``environment.INHERITED``) and those that ``inherit_env`` names, so that no key leaks.

    The output is recorded on a span of the attempt, with the keys redacted. An exit code other than 0 fails the attempt
    with the end of stderr. On a timeout or a cancellation the whole group is terminated, then killed.
    """

    returns_output: ClassVar[bool] = True

    def __init__(
        self,
        command: Sequence[str],
        reward: RewardFunction | RewardSource | None = None,
        *,
        task_via: TaskVia | None = None,
        env: Mapping[str, str] | None = None,
        inherit_env: Sequence[str] = (),
        cwd: str | os.PathLike[str] | None = None,
        llm: str | None = None,
        name: str | None = None,
        kill_after_s: float = 5.0,
        max_output_bytes: int = 256 * 1024,
    ) -> None:
        """Describes the command.

        Args:
            command: program and arguments, run without a shell. ``{task}`` in an argument is replaced by the task.
            reward: ``reward(task, output, rollout)``, where output is stdout; or the place where the command writes it:
                ``stdout``, on the last line; ``file``, in the file named by ``AGL_REWARD_FILE``; ``exit_code``: exit
                code 0 is a reward of 1, exit code 1 a reward of 0. The line or file holds a number, or a JSON object of
                numbers whose key ``reward`` is the final reward; its key ``feedback`` may be a text. None: the command
                reports spans to the store, or the trainer has a reward function.
            task_via: how the task is passed: ``argument``, in place of ``{task}`` or at the end; ``stdin``; ``env``, in
                ``AGL_TASK``. Text is passed as it is, anything else as JSON. Default: ``argument`` if the command has a
                ``{task}``, else ``stdin``.
            env: further variables; they take precedence.
            inherit_env: names or patterns (``AWS_*``) of variables to inherit; ``*`` inherits all.
            cwd: working directory; default is the current one.
            llm: name of the model among the resources; needed if there are several models and none is named ``llm``.
            name: name of the agent in traces; default is the last part of the program's path.
            kill_after_s: seconds between SIGTERM and SIGKILL.
            max_output_bytes: how much of the end of stdout and of stderr is kept.

        Raises:
            ConfigError: an argument is invalid.
        """
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ConfigError(f"command = {command!r}: give a list of strings, as in ['python', 'my_agent.py']")
        if reward is not None and not callable(reward) and reward not in get_args(RewardSource):
            raise ConfigError(f"reward = {reward!r}: give a function or one of: {', '.join(get_args(RewardSource))}")
        has_placeholder = any(_PLACEHOLDER in part for part in command)
        task_via = task_via or ("argument" if has_placeholder else "stdin")
        if task_via not in get_args(TaskVia):
            raise ConfigError(f"task_via = {task_via!r}: give one of: {', '.join(get_args(TaskVia))}")
        if has_placeholder and task_via != "argument":
            raise ConfigError(f"task_via = {task_via!r}, but the command has a {{task}}; leave one of them out")
        if max_output_bytes < 1 or kill_after_s < 0:
            raise ConfigError(f"max_output_bytes = {max_output_bytes}, kill_after_s = {kill_after_s}: too small")
        command = [*command, _PLACEHOLDER] if task_via == "argument" and not has_placeholder else list(command)
        self.command = command
        self.name = name or Path(command[0]).name
        self._reward = reward
        self._task_via = task_via
        self._env = dict(env or {})
        self._inherit_env = tuple(inherit_env)
        self._cwd = None if cwd is None else os.fspath(cwd)
        self._llm = llm
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

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        """Runs the command once, emits its reward if ``reward`` is set, and returns stdout.

        Raises:
            RolloutError: the command cannot be started, fails, or gives no reward.
        """
        hide_process()
        with tempfile.TemporaryDirectory(prefix="agl-", ignore_cleanup_errors=True) as folder:
            output, exit_code, secrets = await self._run(task, resources, rollout, Path(folder))
            if callable(self._reward):
                reward = self._reward(task, output, rollout)
                rating = read_rating(await reward if inspect.isawaitable(reward) else reward, self._reward)
                emit_reward(rating)  # type: ignore[arg-type] # refuses None
            elif self._reward == "exit_code":
                emit_reward(1.0 - exit_code)
            elif self._reward == "file":
                text = read_agent_file(Path(folder) / "reward")
                self._emit_reward(text, "the file AGL_REWARD_FILE", secrets)
            elif self._reward == "stdout":
                self._emit_reward(output.rstrip().rpartition("\n")[2], "the last line of its stdout", secrets)
        return output

    async def _run(
        self, task: Any, resources: NamedResources, rollout: Rollout, folder: Path
    ) -> tuple[str, int, Collection[str]]:
        """Returns stdout, the exit code, and the keys that the command got."""
        text = task if isinstance(task, str) else json.dumps(task, ensure_ascii=False)
        stdin = folder / "task"
        stdin.write_text(text if self._task_via == "stdin" else "", encoding="utf-8")
        trace = get_active_trace()
        store = None if trace is None else trace.store
        env = build_environment(resources, rollout, folder, inherit=self._inherit_env, llm=self._llm, store=store)
        stdout, stderr = Tail(self._max_output_bytes), Tail(self._max_output_bytes)
        with self._open_span(text) as span:
            env |= {"AGL_TASK": text} if self._task_via == "env" else {}
            env |= {**_trace_context(), **self._env}
            secrets = {env[name] for name in _SECRETS if len(env.get(name, "")) >= _MIN_SECRET_CHARS}
            exit_code: int | None = None
            try:
                exit_code = await run_group(
                    [part.replace(_PLACEHOLDER, text) for part in self.command],
                    env=env,
                    cwd=self._cwd,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    kill_after_s=self._kill_after_s,
                )
            finally:  # the output of a command that was stopped may tell why
                recorded = {
                    semconv.OPERATION_OUTPUT: _redact(stdout.text, secrets),
                    "agentlightning.command.stderr": _redact(stderr.text, secrets),
                    "agentlightning.command.dropped_bytes": stdout.dropped + stderr.dropped,
                    **({} if exit_code is None else {"agentlightning.command.exit_code": exit_code}),
                }
                if span is not None:
                    span.set_attributes(recorded)
            if exit_code not in ((0, 1) if self._reward == "exit_code" else (0,)):
                raise RolloutError(self._explain(exit_code, _redact(stderr.text, secrets)))
            if exit_code and (reason := _redact(stderr.text, secrets).strip()[-_SHOWN_CHARS:]):
                emit_feedback(reason)
        return stdout.text, exit_code, secrets

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
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        feedback = value.pop("feedback", "") if isinstance(value, dict) else ""
        if isinstance(feedback, str) and feedback.strip():
            emit_feedback(_redact(feedback, secrets))
        if _is_number(value):
            emit_reward(value)
        elif isinstance(value, dict) and "reward" in value and all(map(_is_number, value.values())):
            emit_reward(value, primary_key="reward")
        else:
            shown = _redact(text.strip(), secrets)[:200]
            raise RolloutError(
                f"the command {self.name!r} gave no reward: {what} is {shown!r}, not a number and not a "
                'JSON object of numbers such as {"reward": 1.0}'
            )


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
