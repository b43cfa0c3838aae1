"""Small environments, as users would write them."""

from __future__ import annotations

import random

import agentlightning as agl


class Stones(agl.Environment):
    """Takes stones with a tool; each stone is worth a tenth."""

    instructions = "Take 1 to 3 stones in each turn."
    max_turns = 8

    def reset(self, task: dict[str, int], seed: int) -> str:
        self.left = 5 + seed % 7
        return f"{self.left} stones"

    def take(self, count: int) -> tuple[str, float, bool]:
        """Take stones; returns how many are left."""
        self.left = max(0, self.left - count)
        return f"{self.left} stones", count / 10, self.left == 0

    def tools(self) -> list[object]:
        return [self.take]


class Guess(agl.Environment):
    """Finds a digit; the action is in brackets."""

    action = r"\[(\d)\]"

    async def reset(self, task: dict[str, int], seed: int) -> str:
        self.number = random.Random(seed).randrange(8)
        return "Which digit?"

    async def step(self, action: str) -> tuple[str, float, bool]:
        is_right = int(action) == self.number
        return ("right" if is_right else "wrong"), float(is_right), is_right
