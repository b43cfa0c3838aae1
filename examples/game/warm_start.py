"""Creates the tiny model of the game example: ``python -m examples.game.warm_start examples/game/checkpoint``.

The demonstrations mostly take one stone and sometimes any number, however many stones are left. The model learns how
a game is played with the tool; reinforcement learning teaches it which moves win.
"""

from __future__ import annotations

import random

from examples.game.agent import INSTRUCTIONS, Game
from examples.game.problems import HEAPS, STRENGTH
from examples.game.rules import moves
from examples.tiny_model import Chat, begin, imitate, make_model, make_tokenizer, save

STEPS = 1000
SEED = 1
MAX_LENGTH = 768
FIXED = (
    INSTRUCTIONS,
    '<tool_call>\n{"name": "take", "arguments": {"count": ',
    "}}\n</tool_call>",
    " / ",
    *("o" * count for count in (4, 3, 2, 1)),
    "error: give a count",
    *(f"error: you cannot take {count}" for count in (2, 3)),
)


def demonstrate(rng: random.Random) -> Chat:
    """Plays a game to its end; the game begins with at most as many stones as the largest test game."""
    game, is_over = Game(), False
    stones = rng.randint(1, HEAPS["test"][-1])
    seen = game.reset({"stones": stones, "strength": STRENGTH}, rng.randrange(10**9))
    chat: Chat = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": seen}]
    while not is_over:
        count = 1 if rng.random() < 0.4 else rng.choice(moves(game.stones))
        arguments = f'{{"count": {count}}}'
        chat.append({"role": "assistant", "tool_calls": [{"function": {"name": "take", "arguments": arguments}}]})
        seen, _, is_over = game.take(count)
        chat.append({"role": "tool", "content": seen})
    return chat


def main() -> None:
    """Creates the checkpoint."""
    directory = begin(__doc__, SEED)
    rng = random.Random(SEED)
    tokenizer = make_tokenizer([*"123"], FIXED, MAX_LENGTH)
    model = make_model(tokenizer, layers=2)
    imitate(model, tokenizer, lambda: demonstrate(rng), steps=STEPS)
    save(model, tokenizer, directory)


if __name__ == "__main__":
    main()
