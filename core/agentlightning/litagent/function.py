"""Agents: ``@rollout`` makes one of a function; ``wrap`` of functions, agents and objects of frameworks."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Protocol, TypeAlias, cast, get_args, get_type_hints, overload

from agentlightning.errors import ConfigError, RolloutError
from agentlightning.litagent.agent import (
    LitAgent,
    Rating,
    RewardFunction,
    RewardSpec,
    check_agent,
    name_function,
    read_rating,
)
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.plugin.registry import get_manager
from agentlightning.records import Dataset, Rollout, RolloutRawResult
from agentlightning.resources import LLM, NamedResources, PromptTemplate, Resource, scope_to_attempt


@dataclass(frozen=True, slots=True)
class _Injected:
    """A parameter of an agent function that Lightning fills."""

    name: str
    resource_types: tuple[type[Resource], ...]
    """Types that its annotation or name implies; may be empty."""
    required: bool
    default: Any = None


class FunctionalLitAgent(LitAgent[Any]):
    """A function as an agent. Calling it calls the function."""

    def __init__(self, function: Callable[..., Any], *, strip_proxy: bool = True) -> None:
        """Reads the function's signature; raises ConfigError if a parameter cannot be filled.

        With ``strip_proxy`` the function gets endpoints of its attempt, which attribute its calls to the attempt.
        """
        functools.update_wrapper(self, function)
        self._function = function
        self._strip_proxy = strip_proxy
        self._is_async = inspect.iscoroutinefunction(_called(function))
        self._injected = _read_signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<agent {getattr(self._function, '__qualname__', self._function)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        module, name = getattr(self, "__module__", None), getattr(self, "__qualname__", "<locals>")
        if module not in (None, "__main__") and "<" not in name:
            import cloudpickle

            if module not in cloudpickle.list_registry_pickle_by_value():
                return _import_agent, (module, name)
        return functools.partial(type(self), strip_proxy=self._strip_proxy), (self._function,)

    def is_async(self) -> bool:
        return self._is_async

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        result = self._function(task, **self._arguments(resources, rollout))
        if inspect.iscoroutine(result):
            result.close()
            raise RolloutError(f"{self!r} returned a coroutine: define the function with `async def`, and await in it")
        return cast(RolloutRawResult, result)

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        result = self._function(task, **self._arguments(resources, rollout))
        return cast(RolloutRawResult, await result if inspect.isawaitable(result) else result)

    def check_resources(self, resources: NamedResources, *, has_model: bool) -> None:
        """Raises ConfigError for a parameter that nothing fills; ``has_model``: the algorithm adds an ``LLM``."""
        for parameter in self._injected:
            if parameter.name not in ("rollout", "resources") and not (has_model and LLM in parameter.resource_types):
                _choose(parameter, resources, self)

    def initial_prompts(self) -> Mapping[str, PromptTemplate]:
        """Returns the default values of parameters that are prompts, under the names of the parameters."""
        return {each.name: each.default for each in self._injected if isinstance(each.default, PromptTemplate)}

    def has_other_prompts(self, given: Mapping[str, Resource]) -> bool:
        """Whether there are prompts that no parameter is named after, so they take the place of default values."""
        names = {each.name for each in self._injected}
        return any(name not in names and isinstance(value, PromptTemplate) for name, value in given.items())

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
    wanted = parameter.resource_types
    matching = [name for name, value in resources.items() if isinstance(value, wanted)]
    if len(matching) == 1:
        return resources[matching[0]]
    if len(matching) > 1:
        raise ConfigError(
            f"{agent!r} asks for {parameter.name!r} and {len(matching)} resources match: "
            f"{', '.join(sorted(matching))}. Name the parameter after one of them"
        )
    if not parameter.required:
        return None
    kind = " of type " + " or ".join(cls.__name__ for cls in wanted) if wanted else ""
    raise ConfigError(
        f"{agent!r} asks for {parameter.name!r} but no resource has this name{' or is' + kind if kind else ''}; "
        f"resources: {', '.join(sorted(resources)) or 'none'}. "
        "Give it in initial_resources, or give the parameter a default"
    )


def _read_signature(function: Callable[..., Any]) -> tuple[_Injected, ...]:
    name = getattr(function, "__qualname__", repr(function))
    if inspect.isclass(function) or not hasattr(function, "__call__"):  # noqa: B004 # a type checker believes callable()
        raise ConfigError(f"{name} is not a function; give one, as in: def agent(task, llm)")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"agent function {name} is a generator; return None, a number or a list of spans instead")
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
        required = parameter.default is inspect.Parameter.empty
        hint = hints.get(parameter.name)
        types = _implied_types(parameter.name, hint)
        if required and not types and parameter.name not in ("rollout", "resources"):
            _check_fillable(name, parameter.name, hint)
        injected.append(_Injected(parameter.name, types, required, None if required else parameter.default))
    return tuple(injected)


def _check_fillable(function: str, name: str, hint: Any) -> None:
    """Raises ConfigError for a parameter whose annotation is not the type of a resource."""
    if not inspect.isclass(hint) or hint is object:
        return
    if issubclass(hint, Rollout):
        raise ConfigError(f"agent function {function}: rename {name!r} to 'rollout' to receive the rollout")
    raise ConfigError(
        f"agent function {function}: nothing can fill the parameter {name!r} of type {hint.__name__}. Parameters after "
        "the task are resources, such as llm: LLM, or 'rollout' or 'resources'; give others a default"
    )


def _called(function: Callable[..., Any]) -> Any:
    """Returns the function that runs: the one inside a partial, or the ``__call__`` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = _called(function)
    try:
        return get_type_hints(target)
    except (NameError, TypeError, AttributeError):  # names that are imported only for type checkers
        return dict(getattr(target, "__annotations__", {}))


def _implied_types(name: str, hint: Any) -> tuple[type[Resource], ...]:
    parts = (hint, *get_args(hint))  # of a union
    if named := tuple(part for part in parts if isinstance(part, type) and issubclass(part, Resource)):
        return named
    words = re.findall(r"\w+", hint) if isinstance(hint, str) else []
    if name == "llm" or "LLM" in words:
        return (LLM,)
    if name == "prompt_template" or "PromptTemplate" in words:
        return (PromptTemplate,)
    return ()


def _import_agent(module: str, qualname: str) -> Any:
    found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    return found if isinstance(found, LitAgent) else FunctionalLitAgent(cast(Callable[..., Any], found))


class _Decorator(Protocol):
    @overload
    def __call__(self, function: Callable[..., Any], /) -> FunctionalLitAgent: ...
    @overload
    def __call__(self, *, strip_proxy: bool = True) -> Callable[[Callable[..., Any]], FunctionalLitAgent]: ...


def _typed(function: Any) -> _Decorator:
    return cast(_Decorator, function)


@_typed
def rollout(function: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """Makes an agent of a sync or async function, which stays callable; raises ConfigError for an unfillable parameter.

    The first parameter is the task. ``rollout`` gets the rollout and ``resources`` all resources. Any other parameter
    gets the resource with its name, else the only resource of the type that its annotation or name (``llm``,
    ``prompt_template``) implies.
    """
    return _decorate(function, strip_proxy)


@_typed
def llm_rollout(function: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """``rollout`` for functions of (task, llm) or (task, llm, rollout); raises ConfigError without ``llm``."""
    return _decorate(function, strip_proxy, "llm_rollout", "llm")


@_typed
def prompt_rollout(function: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """``rollout`` for functions of (task, prompt_template) or (task, prompt_template, rollout)."""
    return _decorate(function, strip_proxy, "prompt_rollout", "prompt_template")


def _decorate(function: Any, strip_proxy: bool, decorator: str = "", required: str | None = None) -> Any:
    if function is None:
        return functools.partial(_decorate, strip_proxy=strip_proxy, decorator=decorator, required=required)
    if required is not None and required not in inspect.signature(function).parameters:
        what = f"@{decorator} needs a parameter {required!r}; {function.__qualname__} has none"
        raise ConfigError(f"{what}. Use @rollout instead")
    return FunctionalLitAgent(function, strip_proxy=strip_proxy)


def first_resources(agent: LitAgent[Any], given: Mapping[str, Resource] | None) -> Mapping[str, Resource] | None:
    """Returns the agent's own prompts, overridden by the given resources; None if there are none."""
    inner = agent.agent if isinstance(agent, RewardedAgent) else agent
    is_filled = isinstance(inner, FunctionalLitAgent) and inner.has_other_prompts(given or {})
    return {**({} if is_filled else agent.initial_prompts()), **(given or {})} or None


Prompts: TypeAlias = Mapping[str, str | PromptTemplate | None] | Iterable[str]
"""Texts of an object that are tuned, by path; see ``wrap`` for the meaning of the values."""


class RewardedAgent(LitAgent[Any]):
    """An agent whose output a reward function rates."""

    agent: LitAgent[Any]
    _reward: RewardFunction | None
    _task_to_input: Callable[[Any], Any] | None

    def __init__(
        self, agent: LitAgent[Any], reward: RewardSpec | None = None, task_to_input: Callable[[Any], Any] | None = None
    ) -> None:
        if isinstance(agent, RewardedAgent):  # the last setting wins
            reward, task_to_input = reward or agent._reward, task_to_input or agent._task_to_input
            agent = agent.agent
        function: RewardFunction | None = (
            get_manager().create("reward", reward) if isinstance(reward, (str, Mapping)) else reward
        )
        if function is not None:
            _check_reward_function(function)
        self.agent = agent
        self._reward = function
        self._task_to_input = task_to_input

    def is_async(self) -> bool:
        return self.agent.is_async()

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        method = self.agent.training_rollout if rollout.mode == "train" else self.agent.validation_rollout
        output = method(self._input(task), resources, rollout)
        if self._reward is None:
            return None if self.agent.returns_output else output
        reward = self._reward(task, output, rollout)
        return read_rating(asyncio.run(_awaited(reward)) if inspect.isawaitable(reward) else reward, self._reward)

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        training = rollout.mode == "train"
        method = self.agent.training_rollout_async if training else self.agent.validation_rollout_async
        output = await method(self._input(task), resources, rollout)
        if self._reward is None:
            return None if self.agent.returns_output else output
        reward = self._reward(task, output, rollout)
        return read_rating(await reward if inspect.isawaitable(reward) else reward, self._reward)

    def initial_prompts(self) -> Mapping[str, PromptTemplate]:
        return self.agent.initial_prompts()

    def own_tasks(self, split: Literal["train", "val"]) -> Dataset[Any] | None:
        return self.agent.own_tasks(split)

    def _input(self, task: Any) -> Any:
        return task if self._task_to_input is None else self._task_to_input(task)


def _check_reward_function(function: Any) -> None:
    if not callable(function):
        raise ConfigError(f"reward = {function!r}: a function is needed, as in: def reward(task, output, rollout)")
    try:
        inspect.signature(function).bind("task", "output", "rollout")
    except TypeError as error:
        where = f"{name_function(function)}{inspect.signature(function)}"
        raise ConfigError(f"the reward function {where} is called with (task, output, rollout): {error}") from None
    except ValueError:  # a builtin without a signature
        return


async def _awaited(value: Awaitable[Rating]) -> Rating:
    return await value


def wrap(
    agent: Any,
    reward: RewardSpec | None = None,
    task_to_input: Callable[[Any], Any] | None = None,
    prompts: Prompts | None = None,
) -> LitAgent[Any]:
    """Returns ``agent`` as a ``LitAgent``.

    Args:
        agent: a LitAgent, a decorated or plain function, a callable object, or an object of a framework that a plugin
            supports.
        reward: rates an output: a function, or the name of a component of the kind ``reward``, alone or with settings,
            such as ``{"name": "judge", "rubric": "..."}``. Without it a function returns or emits its reward itself,
            and the output of a framework's object is dropped.
        task_to_input: converts a task to the agent's input; by default the task is the input.
        prompts: texts of a framework's object to tune, by path, such as ``writer.instructions``; an error for an
            unknown path lists the known paths. A value is the initial text, or (one word) the name of the resource that
            holds the text, or None for the object's own text, as in a plain list of paths. Without another name the
            resource has the path as its name. In each rollout the object uses the texts of these resources, whose
            placeholders are filled from the fields of the task.

    Raises:
        ConfigError: the object is not an agent, or lacks one of the prompts.
    """
    if isinstance(agent, RewardedAgent) and prompts is None:
        return RewardedAgent(agent, reward, task_to_input) if reward or task_to_input else agent
    wrapped = _to_agent(agent, WrapOptions(_read_prompts(prompts)))
    if reward is None and task_to_input is None and not wrapped.returns_output:
        return wrapped
    return RewardedAgent(wrapped, reward, task_to_input)


def _to_agent(agent: Any, options: WrapOptions) -> LitAgent[Any]:
    if inspect.isclass(agent):
        raise ConfigError(f"{agent.__name__} is a class; give an instance, as in {agent.__name__}()")
    is_function = inspect.isroutine(agent) or isinstance(agent, functools.partial)
    if not is_function and not isinstance(agent, LitAgent):
        found: LitAgent[Any] | None = get_manager().hook.wrap_agent(agent=agent, options=options)
        if found is not None:
            return found
    if not isinstance(agent, LitAgent) and (not callable(agent) or _calls_elsewhere(agent)):
        cls = type(agent)
        what = repr(agent) if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        why = (
            "; it would call its own endpoint with its own key, and no call would be recorded"
            if callable(agent)
            else ""
        )
        raise ConfigError(
            f"{what:.200} is not an agent, and no plugin supports its framework (`agl plugins`){why}. Give a function "
            "that uses the endpoint of its rollout: `def agent(task, llm: agl.LLM)` with base_url=llm.endpoint, "
            "api_key=llm.api_key and model=llm.model; docs/integrations.md shows it for each framework"
        )
    if options.prompts:
        raise ConfigError(
            f"prompts= names texts of a framework's object, and {agent!r} is not one; give the function a parameter "
            "prompt_template, or read the prompts from resources"
        )
    if isinstance(agent, LitAgent):
        check_agent(agent)
        return agent
    return FunctionalLitAgent(agent)


def _calls_elsewhere(agent: Callable[..., Any]) -> bool:
    """Whether an installed package, and no function of the user, defines the call of an object without resources."""
    if inspect.isroutine(inspect.unwrap(agent)) or isinstance(agent, functools.partial):
        return False
    owner = next((cls for cls in type(agent).__mro__ if "__call__" in vars(cls)), type(agent))
    file = getattr(sys.modules.get(owner.__module__), "__file__", None) or ""
    if {"site-packages", "dist-packages"}.isdisjoint(PurePath(file).parts):
        return False
    return not any(each.resource_types or each.name == "resources" for each in _read_signature(agent))


def _read_prompts(prompts: Prompts | None) -> Mapping[str, str | PromptTemplate | None]:
    if prompts is None or isinstance(prompts, Mapping):
        return prompts or {}
    if isinstance(prompts, str):
        raise ConfigError(f"prompts = {prompts!r}: give a list of paths, or a mapping from paths to texts")
    return dict.fromkeys(prompts)
