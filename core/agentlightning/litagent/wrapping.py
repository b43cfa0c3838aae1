"""``wrap``: a ``LitAgent`` of anything that is an agent."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

from agentlightning.errors import ConfigError, RolloutError
from agentlightning.litagent.agent import LitAgent, RewardFunction, check_agent, check_result
from agentlightning.litagent.framework import FrameworkAgent
from agentlightning.litagent.function import FunctionalLitAgent
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.plugin.registry import get_manager
from agentlightning.resources import NamedResources, PromptTemplate
from agentlightning.types import Rollout, RolloutRawResult

Prompts: TypeAlias = Mapping[str, str | PromptTemplate | None] | Iterable[str]
"""Which texts of an object are tuned, by path; ``wrap`` says what the values mean."""


class RewardedAgent(LitAgent[Any]):
    """An agent whose output a reward function turns into the final reward."""

    agent: LitAgent[Any]
    _reward: RewardFunction | None
    _task_to_input: Callable[[Any], Any] | None

    def __init__(
        self,
        agent: LitAgent[Any],
        reward: RewardFunction | None = None,
        task_to_input: Callable[[Any], Any] | None = None,
    ) -> None:
        if isinstance(agent, RewardedAgent):  # what is said last counts
            reward, task_to_input = reward or agent._reward, task_to_input or agent._task_to_input
            agent = agent.agent
        if reward is not None:
            _check_reward_function(reward)
        self.agent = agent
        self._reward = reward
        self._task_to_input = task_to_input

    def is_async(self) -> bool:
        return self.agent.is_async()

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        method = self.agent.training_rollout if rollout.mode == "train" else self.agent.validation_rollout
        output = method(self._input(task), resources, rollout)
        if self._reward is None:
            return self._without_reward(output)
        reward = self._reward(task, output, rollout)
        return self._judged(asyncio.run(_awaited(reward)) if inspect.isawaitable(reward) else reward)

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        training = rollout.mode == "train"
        method = self.agent.training_rollout_async if training else self.agent.validation_rollout_async
        output = await method(self._input(task), resources, rollout)
        if self._reward is None:
            return self._without_reward(output)
        reward = self._reward(task, output, rollout)
        return self._judged(await reward if inspect.isawaitable(reward) else reward)

    def _judged(self, reward: Any) -> RolloutRawResult:
        """The reward as a number; the error names the function, so that nobody looks for the mistake in the agent."""
        if isinstance(reward, (str, list, tuple, Mapping)):
            raise RolloutError(f"the reward function {_name(self._reward)} returned {reward!r:.200}; return a number")
        return check_result(reward)

    def _input(self, task: Any) -> Any:
        return task if self._task_to_input is None else self._task_to_input(task)

    def _without_reward(self, output: RolloutRawResult) -> RolloutRawResult:
        return None if isinstance(self.agent, FrameworkAgent) else output


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
    except ValueError:  # a builtin that does not tell its signature
        return


async def _awaited(value: Awaitable[float]) -> float:
    return await value


def wrap(
    agent: Any,
    reward: RewardFunction | None = None,
    task_to_input: Callable[[Any], Any] | None = None,
    prompts: Prompts | None = None,
) -> LitAgent[Any]:
    """Makes a ``LitAgent`` of anything that is an agent.

    Args:
        agent: a LitAgent, a decorated or plain function, a callable object, or an object of a framework that a plugin
            knows.
        reward: what an output is worth. Without it a function returns its reward itself or emits it, and the output of
            a framework's object is dropped.
        task_to_input: what the agent is given for a task; default is the task.
        prompts: which texts of a framework's object are tuned, by path, such as ``writer.instructions``; an unknown one
            raises an error that lists those there are. A value is what tuning begins with, or (one word) the name of
            the resource that holds it, or None for the object's own text, as in a plain list of paths. Unless named
            otherwise the resource has the path as its name. In each rollout the object has the texts of its resources,
            whose gaps are filled from the fields of the task.

    Raises:
        ConfigError: the object is no agent, or does not have those prompts.
    """
    if isinstance(agent, RewardedAgent) and prompts is None:
        return RewardedAgent(agent, reward, task_to_input) if reward or task_to_input else agent
    wrapped = _to_agent(agent, WrapOptions(_read_prompts(prompts)))
    if reward is None and task_to_input is None and not isinstance(wrapped, FrameworkAgent):
        return wrapped
    return RewardedAgent(wrapped, reward, task_to_input)


def initial_prompts(agent: LitAgent[Any]) -> dict[str, PromptTemplate]:
    """What the tuned prompts of a wrapped object begin as, by the name of their resource."""
    if isinstance(agent, RewardedAgent):
        agent = agent.agent
    return agent.prompts if isinstance(agent, FrameworkAgent) else {}


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
            f"{agent!r} is no agent; give a function, a LitAgent, a callable object or an object of a framework that a "
            "plugin knows (`agl plugins`)"
        )
    if options.prompts:
        raise ConfigError(
            f"prompts= names texts of a framework's object, and {agent!r} is none; give the function a parameter "
            "prompt_template, or read them from resources"
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
