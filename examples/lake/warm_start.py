"""Creates the tiny model of the frozen lake: ``python -m examples.lake.warm_start examples/lake/checkpoint``.

Three of four demonstrated moves go right, and down at the edge, wherever the holes are; the fourth is on a shortest way
to the goal. The model learns how a move is written; reinforcement learning teaches it to look.
"""

from __future__ import annotations

import random
import re
from typing import Any

from examples.lake.problems import train
from examples.tiny_model import Chat, begin, imitate, make_model, make_tokenizer, save

from agentlightning_plugins.environments.textarena import TextArenaEnvironment

GAME: Any = TextArenaEnvironment("FrozenLake-v0")
SIZE = 4
MOVES = {"right": (0, 1), "down": (1, 0), "left": (0, -1), "up": (-1, 0)}
LOOKS = 0.25
"""Share of moves that avoid the holes."""
STEPS = 400
SEED = 1
MAX_LENGTH = 1024
MOST_MOVES = 8

Cell = tuple[int, int]


def read(board: str) -> dict[Cell, str]:
    """Returns what is on each cell of a board: a blank, ``H``, ``G`` or ``P``."""
    cells = re.findall(r"(?<=\|)( .{3} )", board)
    return {(i // SIZE, i % SIZE): cell.strip() for i, cell in enumerate(cells)}


def neighbours(cells: dict[Cell, str], at: Cell) -> dict[str, Cell]:
    """Returns the cells that can be reached in one move, holes included."""
    near = {name: (at[0] + down, at[1] + right) for name, (down, right) in MOVES.items()}
    return {name: cell for name, cell in near.items() if cell in cells}


def shortest(cells: dict[Cell, str], start: Cell) -> list[str]:
    """Returns the moves with which a shortest way to the goal begins."""
    distance = {(SIZE - 1, SIZE - 1): 0}
    queue = list(distance)
    for cell in queue:
        for near in neighbours(cells, cell).values():
            if near not in distance and cells[near] != "H":
                distance[near] = distance[cell] + 1
                queue.append(near)
    ways = {name: distance[near] for name, near in neighbours(cells, start).items() if near in distance}
    return [name for name, steps in ways.items() if steps == min(ways.values())]


def demonstrate(rng: random.Random) -> Chat:
    """Plays a game of the training split to its end, or for some moves."""
    seen, is_over = GAME.reset({}, rng.choice(train())["seed"]), False
    chat: Chat = [{"role": "user", "content": seen}]
    for _ in range(MOST_MOVES):
        cells = read(seen)
        at = next(cell for cell, mark in cells.items() if mark == "P")
        name = rng.choice(shortest(cells, at)) if rng.random() < LOOKS else "right" if at[1] < SIZE - 1 else "down"
        chat.append({"role": "assistant", "content": f"[{name}]"})
        seen, _, is_over = GAME.step(f"[{name}]")
        if is_over:
            break
        chat.append({"role": "user", "content": seen})
    return chat


def main() -> None:
    """Creates the checkpoint."""
    directory = begin(__doc__, SEED)
    rng = random.Random(SEED)
    first = GAME.reset({}, SEED)
    rules, end = first.partition("\n\n+")[0], first.rpartition("+\n")[2]
    line = "+-----" * SIZE + "+\n"
    moved = [f"[GAME] You moved {name} to position " for name in MOVES]
    places = [f"({down}, {right}).\n" for down in range(SIZE) for right in range(SIZE)]
    cells = [f" {mark:^3} |" for mark in (" ", "P", "H", "G")]
    written = [f"[{name}]" for name in MOVES]
    fixed = (rules, end, line, *moved, *places, *cells, *written, "[Player] ", "[GAME] Current Board:\n\n")
    tokenizer = make_tokenizer([], fixed, MAX_LENGTH)
    model = make_model(tokenizer)
    chats = [demonstrate(rng) for _ in range(6000)]
    imitate(model, tokenizer, lambda: rng.choice(chats), steps=STEPS)
    save(model, tokenizer, directory)


if __name__ == "__main__":
    main()
