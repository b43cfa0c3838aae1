"""Agents: a function, a decorated function or a ``LitAgent``; every one of them becomes a ``LitAgent`` here."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast, get_type_hints, overload

from agentlightning.errors import ConfigError, RolloutError
from agentlightning.resources import LLM, NamedResources, PromptTemplate, Resource, scope_to_attempt
from agentlightning.types import Rollout, RolloutRawResult, Span

T = TypeVar("T")
RewardFunction: TypeAlias = Callable[[Any, Any, Rollout], float | Awaitable[float]]
"""``reward(task, output, rollout)``: what the output of the agent is worth."""


class LitAgent(Generic[T]):
    """An agent as a class. Override ``rollout`` or ``rollout_async``; the others fall back on these two.

    ``training_rollout`` runs for mode ``train``, ``validation_rollout`` for every other. One instance serves many
    rollouts at once, so keep what belongs to one rollout in local variables.
    """

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Runs the agent on one task.

        Args:
            task: the rollout's input, a private copy.
            resources: what is tuned, by name, as published.
            rollout: which rollout this is, with its attempt.

        Returns:
            None (the trace says it all), a number (the final reward), or a list of spans.
        """
        raise ConfigError(f"{type(self).__name__} defines neither rollout nor rollout_async; define one of them")

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """As ``rollout``, for agents that await."""
        return self.rollout(task, resources, rollout)

    def training_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """As ``rollout``, for training tasks."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """As ``rollout``, for validation and test tasks."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """As ``training_rollout``, for agents that await."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """As ``validation_rollout``, for agents that await."""
        return await self.rollout_async(task, resources, rollout)

    def is_async(self) -> bool:
        """Whether the runner awaits this agent; a synchronous one gets a thread per rollout."""
        return any(
            getattr(type(self), name) is not getattr(LitAgent, name)
            for name in ("rollout_async", "training_rollout_async", "validation_rollout_async")
        )


@dataclass(frozen=True, slots=True)
class _Injected:
    """One parameter of an agent function that Lightning fills."""

    name: str
    resource_type: type[Resource] | None
    required: bool


class FunctionalLitAgent(LitAgent[Any]):
    """An agent function. Calling it calls the function itself; everything else is ``LitAgent``."""

    def __init__(self, function: Callable[..., Any], *, strip_proxy: bool = True) -> None:
        """Reads the function's signature.

        Args:
            function: its first parameter is the task; the others are injected by name and type.
            strip_proxy: give the function endpoints of its own attempt, so that calls are attributed by themselves.

        Raises:
            ConfigError: no first parameter for the task, or ``*args`` and positional-only ones where a name is needed.
        """
        functools.update_wrapper(self, function)
        self._function = function
        self._strip_proxy = strip_proxy
        self._is_async = inspect.iscoroutinefunction(function)
        self._injected = _read_signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<agent {getattr(self._function, '__qualname__', self._function)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        module, name = getattr(self, "__module__", None), getattr(self, "__qualname__", "<locals>")
        if module not in (None, "__main__") and "<" not in name:
            return _import_agent, (module, name)
        return type(self)._by_value, (self._function, self._strip_proxy)

    @classmethod
    def _by_value(cls, function: Callable[..., Any], strip_proxy: bool) -> FunctionalLitAgent:
        return cls(function, strip_proxy=strip_proxy)

    def is_async(self) -> bool:
        return self._is_async

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return cast(RolloutRawResult, self._function(task, **self._arguments(resources, rollout)))

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        result = self._function(task, **self._arguments(resources, rollout))
        return cast(RolloutRawResult, await result if inspect.isawaitable(result) else result)

    def _arguments(self, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        scoped = scope_to_attempt(resources, rollout) if self._strip_proxy else dict(resources)
        arguments: dict[str, Any] = {}
        for parameter in self._injected:
            if parameter.name == "rollout":
                arguments["rollout"] = rollout
            elif parameter.name == "resources":
                arguments["resources"] = resources
            else:
                found = _choose(parameter, scoped, self)
                if found is not None:
                    arguments[parameter.name] = found
        return arguments


def _choose(parameter: _Injected, resources: Mapping[str, Resource], agent: FunctionalLitAgent) -> Resource | None:
    if parameter.name in resources:
        return resources[parameter.name]
    wanted = parameter.resource_type
    matching = [name for name, value in resources.items() if wanted is not None and isinstance(value, wanted)]
    if len(matching) == 1:
        return resources[matching[0]]
    if len(matching) > 1:
        raise ConfigError(
            f"{agent!r} asks for {parameter.name!r} and {len(matching)} resources could be meant: "
            f"{', '.join(sorted(matching))}. Name the parameter after the one you want"
        )
    if not parameter.required:
        return None
    kind = f" of type {wanted.__name__}" if wanted is not None else ""
    raise ConfigError(
        f"{agent!r} asks for {parameter.name!r} but no resource has this name{' or is' + kind if kind else ''}; "
        f"resources: {', '.join(sorted(resources)) or 'none'}. "
        "Give it in initial_resources, or give the parameter a default"
    )


def _read_signature(function: Callable[..., Any]) -> tuple[_Injected, ...]:
    name = getattr(function, "__qualname__", repr(function))
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise ConfigError(f"agent function {name} needs a first parameter for the task, as in: def {name}(task, llm)")
    hints = _hints(function)
    injected = []
    for parameter in parameters[1:]:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"agent function {name}: parameter {parameter.name!r} is positional-only; it is filled by name"
            )
        injected.append(
            _Injected(
                name=parameter.name,
                resource_type=_implied_type(parameter.name, hints.get(parameter.name)),
                required=parameter.default is inspect.Parameter.empty,
            )
        )
    return tuple(injected)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target)
    except (NameError, TypeError, AttributeError):  # names that exist for type checkers only
        return dict(getattr(target, "__annotations__", {}))


def _implied_type(name: str, annotation: Any) -> type[Resource] | None:
    if isinstance(annotation, type) and issubclass(annotation, Resource):
        return annotation
    text = annotation if isinstance(annotation, str) else ""
    if name == "llm" or "LLM" in text:
        return LLM
    if name == "prompt_template" or "PromptTemplate" in text:
        return PromptTemplate
    return None


def _import_agent(module: str, qualname: str) -> Any:
    found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    return found if isinstance(found, LitAgent) else FunctionalLitAgent(cast(Callable[..., Any], found))


@overload
def rollout(function: Callable[..., Any]) -> FunctionalLitAgent: ...
@overload
def rollout(*, strip_proxy: bool = True) -> Callable[[Callable[..., Any]], FunctionalLitAgent]: ...
def rollout(
    function: Callable[..., Any] | None = None, *, strip_proxy: bool = True
) -> FunctionalLitAgent | Callable[[Callable[..., Any]], FunctionalLitAgent]:
    """Makes an agent of a function, sync or async, that stays callable as it was.

    The first parameter is the task. ``rollout`` gets the rollout, ``resources`` all resources; any other parameter gets
    the resource of its name, else the only resource of the type that its annotation or name (``llm``,
    ``prompt_template``) implies.

    Raises:
        ConfigError: a signature that cannot be filled.
    """
    if function is None:
        return functools.partial(FunctionalLitAgent, strip_proxy=strip_proxy)
    return FunctionalLitAgent(function, strip_proxy=strip_proxy)


@overload
def llm_rollout(function: Callable[..., Any]) -> FunctionalLitAgent: ...
@overload
def llm_rollout(*, strip_proxy: bool = True) -> Callable[[Callable[..., Any]], FunctionalLitAgent]: ...
def llm_rollout(
    function: Callable[..., Any] | None = None, *, strip_proxy: bool = True
) -> FunctionalLitAgent | Callable[[Callable[..., Any]], FunctionalLitAgent]:
    """``rollout`` for functions of (task, llm) or (task, llm, rollout); a missing ``llm`` is an error at once."""
    return _requiring("llm", function, strip_proxy)


@overload
def prompt_rollout(function: Callable[..., Any]) -> FunctionalLitAgent: ...
@overload
def prompt_rollout() -> Callable[[Callable[..., Any]], FunctionalLitAgent]: ...
def prompt_rollout(
    function: Callable[..., Any] | None = None,
) -> FunctionalLitAgent | Callable[[Callable[..., Any]], FunctionalLitAgent]:
    """``rollout`` for functions of (task, prompt_template) or (task, prompt_template, rollout)."""
    return _requiring("prompt_template", function, True)


def _requiring(
    name: str, function: Callable[..., Any] | None, strip_proxy: bool
) -> FunctionalLitAgent | Callable[[Callable[..., Any]], FunctionalLitAgent]:
    if function is None:
        return lambda function: _require(name, function, strip_proxy)
    return _require(name, function, strip_proxy)


def _require(name: str, function: Callable[..., Any], strip_proxy: bool) -> FunctionalLitAgent:
    if name not in inspect.signature(function).parameters:
        decorator = "llm_rollout" if name == "llm" else "prompt_rollout"
        raise ConfigError(
            f"@{decorator} needs a parameter {name!r}; {function.__qualname__} has none. Use @rollout instead"
        )
    return FunctionalLitAgent(function, strip_proxy=strip_proxy)


class RewardedAgent(LitAgent[Any]):
    """An agent whose output a reward function turns into the final reward."""

    def __init__(
        self,
        agent: LitAgent[Any],
        reward: RewardFunction | None = None,
        task_to_input: Callable[[Any], Any] | None = None,
    ) -> None:
        self.agent = agent
        self._reward = reward
        self._task_to_input = task_to_input

    def is_async(self) -> bool:
        return self.agent.is_async()

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        method = self.agent.training_rollout if rollout.mode == "train" else self.agent.validation_rollout
        output = method(self._input(task), resources, rollout)
        if self._reward is None:
            return output
        reward = self._reward(task, output, rollout)
        if inspect.isawaitable(reward):
            import asyncio

            reward = asyncio.run(_awaited(reward))
        return reward

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        training = rollout.mode == "train"
        method = self.agent.training_rollout_async if training else self.agent.validation_rollout_async
        output = await method(self._input(task), resources, rollout)
        if self._reward is None:
            return output
        reward = self._reward(task, output, rollout)
        return await reward if inspect.isawaitable(reward) else reward

    def _input(self, task: Any) -> Any:
        return task if self._task_to_input is None else self._task_to_input(task)


async def _awaited(value: Awaitable[float]) -> float:
    return await value


def wrap(
    agent: Any, reward: RewardFunction | None = None, task_to_input: Callable[[Any], Any] | None = None
) -> LitAgent[Any]:
    """Makes a ``LitAgent`` of anything that is an agent.

    Args:
        agent: a LitAgent, a decorated or plain function, or a callable object.
        reward: what an output is worth; without it the agent returns its reward itself or emits it.
        task_to_input: what the agent is given for a task; default is the task.

    Raises:
        ConfigError: the object is no agent.
    """
    if isinstance(agent, LitAgent):
        wrapped: LitAgent[Any] = agent
    elif inspect.isclass(agent):
        raise ConfigError(f"{agent.__name__} is a class; give an instance, as in {agent.__name__}()")
    elif callable(agent):
        wrapped = FunctionalLitAgent(agent)
    else:
        raise ConfigError(f"{agent!r} is no agent; give a function, a LitAgent or a callable object")
    return wrapped if reward is None and task_to_input is None else RewardedAgent(wrapped, reward, task_to_input)


def check_result(result: Any) -> RolloutRawResult:
    """Refuses what an agent may not return.

    Raises:
        RolloutError: neither None, a number nor a list of spans.
    """
    if result is None or (isinstance(result, (int, float)) and not isinstance(result, bool)):
        return result
    if isinstance(result, bool):
        return float(result)
    if hasattr(result, "item") and not hasattr(result, "__len__"):  # a numpy or torch scalar
        return float(result)
    if isinstance(result, (list, tuple)) and all(isinstance(span, Span) for span in result):
        return list(result)
    raise RolloutError(
        f"the agent returned {str(result)[:200]!r} ({type(result).__name__}); return None, a number (the final reward) "
        "or a list of spans, or give a reward function: Trainer.fit(agent, ..., reward=...)"
    )


__all__ = [
    "FunctionalLitAgent",
    "LitAgent",
    "RewardFunction",
    "RewardedAgent",
    "check_result",
    "llm_rollout",
    "prompt_rollout",
    "rollout",
    "wrap",
]
