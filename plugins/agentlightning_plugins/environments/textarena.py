"""``textarena:NAME``: games of TextArena."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from typing import Any, Final

from agentlightning.environment import Environment, Observation, StepResult
from agentlightning.errors import ConfigError, suggest
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.shared.configuration.sources import load_attribute

_RANDOM: Final = threading.Lock()
"""Games draw from the random numbers of the process: each episode puts its own in place while it runs."""


@hookimpl
def components() -> list[Component]:
    target = f"{__name__}:TextArenaEnvironment"
    return [Component("environment", "textarena", target, extra="textarena", summary="games of TextArena")]


class TextArenaEnvironment(Environment):
    """A game of TextArena; the model is player 0, and the reward is this player's at the end."""

    def __init__(
        self,
        address: str,
        options: dict[str, Any] | None = None,
        players: int = 1,
        opponent: str | Callable[[str], str] | None = None,
    ) -> None:
        """Describes the game.

        Args:
            address: the id of the game, such as ``GuessTheNumber-v0``.
            options: keyword arguments of the game.
            players: number of players.
            opponent: ``module:attribute`` of a function from observation to action, which plays all other players.

        Raises:
            ConfigError: there is no such game, or players without an opponent.
        """
        from textarena.envs.registration import ENV_REGISTRY

        if address not in ENV_REGISTRY:
            raise ConfigError(f"TextArena has no game {address!r}.{suggest(address, ENV_REGISTRY)}")
        if (players > 1) is not (opponent is not None):
            raise ConfigError(
                f"textarena:{address}: players = {players} and opponent = {opponent!r}; a game of several players "
                "needs an opponent, a game of one has none"
            )
        self.address, self.options, self.players = address, options or {}, players
        self.opponent: Any = load_attribute(opponent) if isinstance(opponent, str) else opponent

    def reset(self, task: Any, seed: int) -> Observation:
        import textarena

        self._random = random.Random(seed).getstate()
        self._game = textarena.make(self.address, **self.options)
        try:
            self._draw(lambda: self._game.reset(num_players=self.players, seed=seed))
        except (AssertionError, ValueError) as error:
            raise ConfigError(f"textarena:{self.address} refuses players = {self.players}: {error}") from error
        self._seen = ""
        return self._watch(is_over=False)

    def step(self, action: str) -> StepResult:
        is_over, _ = self._draw(lambda: self._game.step(action=action))
        observation = self._watch(is_over)
        if not self._game.state.done:
            return observation, None, False
        rewards, info = self._game.close()
        reason = (info or {}).get(0, {}).get("reason") or observation
        return str(reason), float((rewards or {}).get(0, 0.0)), True

    def _watch(self, is_over: bool) -> str:
        """Lets the opponents move; returns what player 0 has not seen."""
        while True:
            player, observation = self._draw(self._game.get_observation)
            if player == 0 or is_over or self._game.state.done:
                break
            move = self.opponent(str(observation))
            is_over, _ = self._draw(functools.partial(self._game.step, action=move))
        text = str(observation)
        new, self._seen = text.removeprefix(self._seen), text
        return new.strip()

    def _draw(self, play: Callable[[], Any]) -> Any:
        with _RANDOM:
            others = random.getstate()
            random.setstate(self._random)
            try:
                return play()
            finally:
                self._random = random.getstate()
                random.setstate(others)
