"""``gymnasium:NAME``: environments of Gymnasium that show themselves as text."""

from __future__ import annotations

import re
from typing import Any

from agentlightning.environment import Environment, Observation, StepResult
from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import Component, hookimpl

_COLOUR = re.compile(r"\x1b\[(\d+)m(.*?)\x1b\[0m", re.DOTALL)


@hookimpl
def components() -> list[Component]:
    target = f"{__name__}:GymnasiumEnvironment"
    return [Component("environment", "gymnasium", target, extra="gymnasium", summary="text environments of Gymnasium")]


class GymnasiumEnvironment(Environment):
    """An environment of Gymnasium whose observations are a ``Text`` space, or that renders itself in the mode ``ansi``.

    Actions are a ``Text`` or a ``Discrete`` space. An answer that fits neither gets an error, and uses up a turn.
    """

    def __init__(self, address: str, options: dict[str, Any] | None = None) -> None:
        """Makes the environment once, to check it.

        Args:
            address: the id, as ``gymnasium.make`` takes it: ``module:Name-v0`` imports the module that registers it.
            options: keyword arguments of the environment.

        Raises:
            ConfigError: there is no such environment, or its observations or actions cannot be written as text.
        """
        self.address, self.options = address, options or {}
        made = self._make()
        self._starts_at = int(getattr(made.action_space, "start", 0))
        count = getattr(made.action_space, "n", None)
        if count is not None:
            last = self._starts_at + int(count) - 1
            self.instructions = f"Answer with the number of an action only, from {self._starts_at} to {last}."
        made.close()

    def _make(self) -> Any:
        import gymnasium
        from gymnasium.spaces import Discrete, Text

        try:
            made = gymnasium.make(self.address, **self.options)
            self._is_rendered = not isinstance(made.observation_space, Text)
            if self._is_rendered and "ansi" in made.metadata.get("render_modes", ()):
                made.close()
                made = gymnasium.make(self.address, **{**self.options, "render_mode": "ansi"})
            elif self._is_rendered:
                raise ConfigError(
                    f"gymnasium:{self.address} has observations in {made.observation_space}, which are no text, and no "
                    "render mode 'ansi'; wrap it in a gymnasium.ObservationWrapper with a Text space"
                )
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
            raise ConfigError(f"gymnasium:{self.address} cannot be made: {error}") from error
        if not isinstance(made.action_space, (Discrete, Text)):
            raise ConfigError(
                f"gymnasium:{self.address} has actions in {made.action_space}; they must be Text or Discrete"
            )
        return made

    def reset(self, task: Any, seed: int) -> Observation:
        self._made = self._make()
        observation, _ = self._made.reset(seed=seed)
        return self._show(observation)

    def step(self, action: str) -> StepResult:
        space = self._made.action_space
        chosen: Any = action.strip()
        if hasattr(space, "n"):
            number = re.fullmatch(r"\D*(\d+)\D*", chosen)
            chosen = space.dtype.type(number[1]) if number else None
        if chosen is None or not space.contains(chosen):
            return f"error: {action[:100]!r} is not an action of {space}"
        observation, reward, is_terminated, is_truncated, _ = self._made.step(chosen)
        return self._show(observation), float(reward), bool(is_terminated or is_truncated)

    def close(self) -> None:
        if hasattr(self, "_made"):
            self._made.close()

    def _show(self, observation: Any) -> str:
        """Returns the observation as text; brackets mark what a rendered one colours: ``[S]FF``."""
        return _COLOUR.sub(r"[\2]", self._made.render()) if self._is_rendered else str(observation)
