"""``Environment``: tasks, reset, tools or step, reward and the end of an episode, in one object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from agentlightning.errors import ConfigError
from agentlightning.records import Dataset

Observation: TypeAlias = str | Sequence[Mapping[str, Any]]
"""The model sees a text, or the parts of a chat message, such as images."""
StepResult: TypeAlias = Observation | tuple[Observation, float | None, bool]
"""An observation, alone or with the reward of the step (None: no reward of its own) and whether the episode is over."""


class Environment:
    """A world that a model acts in: derive from it, and override ``reset`` and either ``step`` or ``tools``.

    It is an agent of any algorithm: ``Trainer(algorithm="grpo").fit(environment)`` plays an episode for each rollout,
    in which the model of the rollout acts. The episode has its own deep copy of the object, so its state belongs in
    attributes. Methods may be ``async``; all plain methods of an episode run in the same thread.

    The final reward is what ``reward`` returns, else the sum of the rewards of the steps.
    """

    instructions: str | None = None
    """The system prompt; a text that algorithms can tune: ``agl.wrap(environment, prompts=["instructions"])``."""
    max_turns: int = 20
    """Maximum number of model calls in an episode."""
    timeout_s: float = 60.0
    """Seconds that one call of a method may take; then the attempt fails."""
    action: str | None = None
    """Regular expression that finds the action in an answer: its first group, or the whole match. None: the answer."""
    seeds: int = 1000
    """How many tasks ``tasks`` returns by default."""

    def tasks(self, split: Literal["train", "val"]) -> Dataset[Any] | None:
        """Returns the tasks of a run that names none: by default ``{"seed": 0}`` and so on for training."""
        return [{"seed": seed} for seed in range(self.seeds)] if split == "train" else None

    def reset(self, task: Any, seed: int) -> Observation | Awaitable[Observation]:
        """Begins an episode; returns the first observation.

        Args:
            task: the input of the rollout.
            seed: the field ``seed`` of the task, else a number that depends only on the task. The same seed begins the
                same episode.
        """
        raise ConfigError(f"{type(self).__name__} does not define reset(self, task, seed); define it")

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Runs an action: an answer of the model, or what ``action`` finds in it."""
        raise ConfigError(f"{type(self).__name__} defines neither step(self, action) nor tools(self); define one")

    def tools(self) -> Sequence[Callable[..., Any] | Mapping[str, Any]] | Awaitable[Sequence[Mapping[str, Any]]]:
        """Returns the tools of the episode, after ``reset``.

        A function is a tool with its name, its parameters and its docstring, and returns what ``step`` returns. A
        mapping is a tool in the format of OpenAI's ``function``, whose calls go to ``call``. An answer without a call
        goes to ``step`` if that is defined, and else ends the episode.
        """
        return ()

    def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult | Awaitable[StepResult]:
        """Runs a tool that ``tools`` returned as a mapping."""
        raise ConfigError(f"{type(self).__name__} does not define call(self, name, arguments) for its tool {name!r}")

    def reward(self, task: Any, output: str) -> float | Awaitable[float | None] | None:
        """Returns the reward of the episode, whose last answer is ``output``; None: the sum of the steps' rewards."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Frees what the episode holds. Called once after each call of ``reset``, whatever happened."""
        return None
