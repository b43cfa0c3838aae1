"""``wrap``: makes a ``LitAgent`` of functions, agents and objects of frameworks."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from agentlightning.errors import ConfigError, RolloutError
from agentlightning.litagent.agent import LitAgent, RewardFunction, RewardSpec, check_agent, check_result
from agentlightning.litagent.function import FunctionalLitAgent
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.plugin.registry import get_manager
from agentlightning.records import Rollout, RolloutRawResult
from agentlightning.resources import NamedResources, PromptTemplate

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
        return self._rated(asyncio.run(_awaited(reward)) if inspect.isawaitable(reward) else reward)

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        training = rollout.mode == "train"
        method = self.agent.training_rollout_async if training else self.agent.validation_rollout_async
        output = await method(self._input(task), resources, rollout)
        if self._reward is None:
            return None if self.agent.returns_output else output
        reward = self._reward(task, output, rollout)
        return self._rated(await reward if inspect.isawaitable(reward) else reward)

    def initial_prompts(self) -> Mapping[str, PromptTemplate]:
        return self.agent.initial_prompts()

    def _rated(self, reward: Any) -> RolloutRawResult:
        """Returns the reward as a number; an error names the reward function, not the agent."""
        try:
            result = check_result(reward)
        except RolloutError:
            result = []
        if isinstance(result, Sequence):
            what = f"{str(reward)[:200]!r} ({type(reward).__name__})"
            raise RolloutError(f"the reward function {_name(self._reward)} returned {what}; return a number") from None
        return result

    def _input(self, task: Any) -> Any:
        return task if self._task_to_input is None else self._task_to_input(task)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _check_reward_function(function: Any) -> None:
    if not callable(function):
        raise ConfigError(f"reward = {function!r}: a function is needed, as in: def reward(task, output, rollout)")
    try:
        inspect.signature(function).bind("task", "output", "rollout")
    except TypeError as error:
        where = f"{_name(function)}{inspect.signature(function)}"
        raise ConfigError(f"the reward function {where} is called with (task, output, rollout): {error}") from None
    except ValueError:  # a builtin without a signature
        return


async def _awaited(value: Awaitable[float]) -> float:
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
    if not callable(agent) and not isinstance(agent, LitAgent):
        raise ConfigError(
            f"{agent!r} is not an agent; give a function, a LitAgent, a callable object or an object of a framework "
            "that a plugin supports (`agl plugins`)"
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


def _read_prompts(prompts: Prompts | None) -> Mapping[str, str | PromptTemplate | None]:
    if prompts is None or isinstance(prompts, Mapping):
        return prompts or {}
    if isinstance(prompts, str):
        raise ConfigError(f"prompts = {prompts!r}: give a list of paths, or a mapping from paths to texts")
    return dict.fromkeys(prompts)
