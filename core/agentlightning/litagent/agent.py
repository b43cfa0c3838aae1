"""``LitAgent``: what every agent becomes."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeAlias, TypeVar

from agentlightning.errors import ConfigError, RolloutError
from agentlightning.resources import NamedResources
from agentlightning.types import Rollout, RolloutRawResult, Span

T = TypeVar("T")
_METHODS: Final = (
    "rollout",
    "rollout_async",
    "training_rollout",
    "training_rollout_async",
    "validation_rollout",
    "validation_rollout_async",
)
RewardFunction: TypeAlias = Callable[[Any, Any, Rollout], float | Awaitable[float]]
"""``reward(task, output, rollout)``: what the output of the agent is worth."""


class LitAgent(Generic[T]):
    """An agent as a class. Override ``rollout`` or ``rollout_async``; the others fall back on these two.

    ``training_rollout`` runs for mode ``train``, ``validation_rollout`` for every other. An agent with any async method
    runs in the event loop, its synchronous ones too. One instance serves many
    rollouts at once, so keep what belongs to one rollout in local variables.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _METHODS:
            _check_method(cls, name)

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
        if _is_overridden(self, "training_rollout"):
            return self.training_rollout(task, resources, rollout)
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """As ``validation_rollout``, for agents that await."""
        if _is_overridden(self, "validation_rollout"):
            return self.validation_rollout(task, resources, rollout)
        return await self.rollout_async(task, resources, rollout)

    def is_async(self) -> bool:
        """Whether the runner awaits this agent; a synchronous one gets a thread per rollout."""
        return any(_is_overridden(self, name) for name in _METHODS if name.endswith("_async"))


def check_agent(agent: LitAgent[Any]) -> None:
    """Refuses an agent that cannot run.

    Raises:
        ConfigError: its class defines none of the methods.
    """
    if not any(_is_overridden(agent, name) for name in _METHODS):
        raise ConfigError(f"{type(agent).__name__} defines neither rollout nor rollout_async; define one of them")


def _is_overridden(agent: LitAgent[Any], name: str) -> bool:
    return getattr(type(agent), name) is not getattr(LitAgent, name)


def _check_method(cls: type, name: str) -> None:
    method = vars(cls).get(name)
    if not inspect.isfunction(method):
        return
    where = f"{cls.__name__}.{name}"
    if inspect.iscoroutinefunction(method) and not name.endswith("_async"):
        raise ConfigError(f"{where} is async; call it {name}_async")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise ConfigError(f"{where} is a generator; it returns None, a number or a list of spans")
    try:
        inspect.signature(method).bind("self", "task", "resources", "rollout")
    except TypeError as error:
        raise ConfigError(
            f"{where}{inspect.signature(method)} is called with (task, resources, rollout): {error}"
        ) from None


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
