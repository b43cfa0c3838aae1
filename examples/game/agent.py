"""The game of stones as an environment, which the model plays through a tool."""

from __future__ import annotations

from typing import Any

from examples.game.rules import moves, reply

import agentlightning as agl

INSTRUCTIONS = "Two players take 1 to 3 stones in turn. Who takes the last one wins. Play with the tool."


def show(stones: int) -> str:
    """Returns the stones as the model sees them, in rows of four, such as ``oooo / oooo / oo``."""
    rows = ["oooo"] * (stones // 4) + ["o" * (stones % 4)] * (stones % 4 > 0)
    return " / ".join(rows) or "none"


class Game(agl.Environment):
    """Games against an opponent of some strength; the model moves first. The reward is 1 for a win."""

    instructions = INSTRUCTIONS
    max_turns = 20

    def reset(self, task: Any, seed: int) -> str:
        """Begins a game."""
        self.stones, self.strength, self.seed = task["stones"], task["strength"], seed
        return show(self.stones)

    def tools(self) -> list[Any]:
        """The model moves with the tool ``take``."""
        return [self.take]

    def take(self, count: int) -> tuple[str, float, bool]:
        """Take stones; the opponent answers. Returns the stones that are left."""
        if count not in moves(self.stones):
            return f"error: you cannot take {str(count)[:10]}", 0.0, False
        self.stones -= count
        if self.stones == 0:
            return show(0), 1.0, True
        self.stones -= reply(self.stones, self.strength, self.seed)
        return show(self.stones), 0.0, self.stones == 0
