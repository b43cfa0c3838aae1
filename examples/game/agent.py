"""A player of a game on the ``openai`` client, as its author would write it: nothing in this file is about training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from examples.game.rules import moves, reply
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionFunctionToolParam

INSTRUCTIONS = "Two players take 1 to 3 stones in turn. Who takes the last one wins. Play with the tool."
TAKE: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "take",
        "description": "Take stones; the opponent answers. Returns the stones that are left.",
        "parameters": {
            "type": "object",
            "properties": {"count": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["count"],
        },
    },
}
MAX_CALLS = 20
"""Maximum number of model calls in a game; an illegal move uses one, too."""


def show(stones: int) -> str:
    """Returns the stones as the model sees them, in rows of four, such as ``oooo / oooo / oo``."""
    rows = ["oooo"] * (stones // 4) + ["o" * (stones % 4)] * (stones % 4 > 0)
    return " / ".join(rows) or "none"


class Game:
    """One game against an opponent of some strength; the model moves first."""

    def __init__(self, stones: int, strength: float, seed: int) -> None:
        self.stones = stones
        self.strength = strength
        self.seed = seed
        self.won: bool | None = None
        """Whether the model has won; None while the game goes on."""

    def take(self, arguments: str) -> str:
        """Runs the tool on the JSON arguments of a call."""
        try:
            count = json.loads(arguments)["count"]
        except (ValueError, TypeError, KeyError):
            return "error: give a count"
        if type(count) is not int or count not in moves(self.stones):
            return f"error: you cannot take {str(count)[:10]}"
        self.stones -= count
        if self.stones == 0:
            self.won = True
        else:
            self.stones -= reply(self.stones, self.strength, self.seed)
            self.won = False if self.stones == 0 else None
        return show(self.stones)


async def play(client: AsyncOpenAI, model: str, task: Mapping[str, Any], **options: Any) -> bool:
    """Plays a game; returns whether the model has won it."""
    game = Game(task["stones"], task["strength"], task["seed"])
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": show(game.stones)}]
    for _ in range(MAX_CALLS):
        completion = await client.chat.completions.create(model=model, messages=messages, tools=[TAKE], **options)
        answer = completion.choices[0].message
        if not answer.tool_calls:
            break
        messages.append(answer)
        for call in answer.tool_calls:
            arguments = call.function.arguments if call.type == "function" else ""
            messages.append({"role": "tool", "tool_call_id": call.id, "content": game.take(arguments)})
            if game.won is not None:
                return game.won
    return False
