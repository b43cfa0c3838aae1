"""``LitAgent``: the base class of all agents."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Final, Generic, Literal, TypeAlias, TypeVar

from agentlightning.emitter import emit_feedback
from agentlightning.errors import ConfigError, RolloutError
from agentlightning.frozen import to_number
from agentlightning.records import AttemptedRollout, Dataset, Rollout, RolloutRawResult, Span
from agentlightning.resources import NamedResources, PromptTemplate

T = TypeVar("T")
_METHODS: Final = tuple(
    f"{mode}rollout{suffix}" for mode in ("", "training_", "validation_") for suffix in ("", "_async")
)
Rating: TypeAlias = float | tuple[float, str]
RewardFunction: TypeAlias = Callable[[Any, Any, Rollout], Rating | Awaitable[Rating]]
"""``reward(task, output, rollout)``: rates the output of the agent; returns the reward, or it and feedback on it."""
RewardSpec: TypeAlias = RewardFunction | str | Mapping[str, Any]
"""A reward function, or the name of a component of the kind ``reward``, alone or with settings."""


running_in: ContextVar[Any] = ContextVar("agentlightning_runner")
"""The runner of the current rollout."""


class _OfRunner:
    """An attribute that is read from the runner of the current rollout; an agent may override it."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, agent: Any, owner: type) -> Any:
        runner = None if agent is None else running_in.get(None)
        if runner is None:
            raise AttributeError(f"{owner.__name__}.{self._name} is available only while a rollout of the agent runs")
        return self._read(runner)


class LitAgent(Generic[T]):
    """An agent as a class. Override ``rollout`` or ``rollout_async``; the other methods call these two by default.

    ``training_rollout`` runs for mode ``train``, ``validation_rollout`` for every other mode. An agent with any async
    method runs in the event loop, including its synchronous methods. One instance serves many rollouts concurrently,
    so keep the state of a rollout in local variables.
    """

    returns_output: ClassVar[bool] = False
    """Whether rollouts return arbitrary output, which a reward function rates; without one, it is dropped."""
    runner: Any = _OfRunner(lambda runner: runner)
    """The runner of the current rollout."""
    tracer: Any = _OfRunner(lambda runner: runner.tracer)
    """The tracer of the current rollout: ``self.tracer.get_langchain_handler()``."""
    trainer: Any = _OfRunner(lambda runner: runner.trainer)
    """The ``Trainer`` of the run, or None. In a runner process it only has the settings."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _METHODS:
            _check_method(cls, name)

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Runs the agent on one task.

        Args:
            task: the rollout's input, a private copy.
            resources: the tuned resources by name, as published.
            rollout: the rollout with its attempt.

        Returns:
            None (the reward is in the trace), a number (the final reward), or a list of spans, ours or OpenTelemetry's.
        """
        raise _missing_rollout(self)

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Like ``rollout``, for async agents."""
        return self.rollout(task, resources, rollout)

    def training_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Like ``rollout``, for training tasks."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Like ``rollout``, for validation and test tasks."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Like ``training_rollout``, for async agents."""
        if _is_overridden(self, "training_rollout"):
            return self.training_rollout(task, resources, rollout)
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Like ``validation_rollout``, for async agents."""
        if _is_overridden(self, "validation_rollout"):
            return self.validation_rollout(task, resources, rollout)
        return await self.rollout_async(task, resources, rollout)

    def is_async(self) -> bool:
        """Whether the runner awaits this agent; a synchronous agent gets a thread per rollout."""
        return any(_is_overridden(self, name) for name in _METHODS if name.endswith("_async"))

    def initial_prompts(self) -> Mapping[str, PromptTemplate]:
        """Returns the initial values of the agent's own prompts by resource name."""
        return {}

    def own_tasks(self, split: Literal["train", "val"]) -> Dataset[Any] | None:
        """Returns the tasks of a run that names none; an environment has some."""
        return None


def check_agent(agent: LitAgent[Any]) -> None:
    """Raises ConfigError for an agent whose class overrides none of the rollout methods."""
    if not any(_is_overridden(agent, name) for name in _METHODS):
        raise _missing_rollout(agent)


def _missing_rollout(agent: LitAgent[Any]) -> ConfigError:
    return ConfigError(f"{type(agent).__name__} defines neither rollout nor rollout_async; define one of them")


def _is_overridden(agent: LitAgent[Any], name: str) -> bool:
    return getattr(type(agent), name) is not getattr(LitAgent, name)


def _check_method(cls: type, name: str) -> None:
    method = vars(cls).get(name)
    if not inspect.isfunction(method):
        return
    where = f"{cls.__name__}.{name}"
    if inspect.iscoroutinefunction(method) and not name.endswith("_async"):
        raise ConfigError(f"{where} is async; rename it to {name}_async")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise ConfigError(f"{where} is a generator; return None, a number or a list of spans instead")
    try:
        inspect.signature(method).bind("self", "task", "resources", "rollout")
    except TypeError as error:
        signature = inspect.signature(method)
        raise ConfigError(f"{where}{signature} is called with (task, resources, rollout): {error}") from None


def check_result(result: Any) -> RolloutRawResult:
    """Returns the result of an agent: None, a number or a list of spans; raises RolloutError for anything else."""
    if result is None or (isinstance(result, (int, float)) and not isinstance(result, bool)):
        return result
    number = to_number(result)
    if number is not None:
        return number
    sdk = sys.modules.get("opentelemetry.sdk.trace")  # its spans exist only where it is imported
    span_types = (Span,) if sdk is None else (Span, sdk.ReadableSpan)
    if isinstance(result, (list, tuple)) and all(isinstance(span, span_types) for span in result):
        return list(result)
    raise RolloutError(
        f"the agent returned {str(result)[:200]!r} ({type(result).__name__}); return None, a number (the final reward) "
        "or a list of spans, or give a reward function: Trainer.fit(agent, ..., reward=...)"
    )


def read_rating(rating: Any, function: Any) -> float | None:
    """Returns the reward that a reward function returned, and emits its feedback; an error names the function."""
    reward, feedback = rating if isinstance(rating, tuple) and len(rating) == 2 else (rating, "")
    try:
        result = check_result(reward)
    except RolloutError:
        result = []
    if isinstance(result, Sequence) or not isinstance(feedback, str):
        what = f"{str(rating)[:200]!r} ({type(rating).__name__})"
        raise RolloutError(
            f"the reward function {name_function(function)} returned {what}; return a number, or a number and a text"
        )
    if feedback.strip():
        emit_feedback(feedback)
    return result


def name_function(function: Any) -> str:
    """Returns the qualified name of a function, or the ``repr`` of a callable object."""
    return getattr(function, "__qualname__", None) or repr(function)


def to_spans(returned: Sequence[Any], rollout: AttemptedRollout) -> list[Span]:
    """Converts the spans that an agent returned, ours or OpenTelemetry's, to spans of the rollout's attempt."""
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    return [
        span.model_copy(update={"rollout_id": rollout_id, "attempt_id": attempt_id})
        if isinstance(span, Span)
        else Span.from_opentelemetry(span, rollout_id, attempt_id)
        for span in returned
    ]
