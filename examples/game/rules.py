"""The game of stones: players take 1 to 3 stones in turn, and the player who takes the last one wins.

Perfect play is known: the player to move can win unless the number of stones is a multiple of 4; to win, always leave
a multiple of 4.
"""

from __future__ import annotations

import random

LARGEST_MOVE = 3


def moves(stones: int) -> list[int]:
    """The numbers of stones that the player to move may take."""
    return list(range(1, min(stones, LARGEST_MOVE) + 1))


def is_won(stones: int) -> bool:
    """Whether the player to move wins if both play perfectly: some move leaves a heap that the other player loses."""
    wins = [False]
    for heap in range(1, stones + 1):
        wins.append(any(not wins[heap - taken] for taken in moves(heap)))
    return wins[stones]


def best_moves(stones: int) -> list[int]:
    """The moves that keep a win, or all of them if the game is lost."""
    return [taken for taken in moves(stones) if not is_won(stones - taken)] or moves(stones)


def reply(stones: int, strength: float, seed: int) -> int:
    """Returns the opponent's move: a best move with the probability ``strength``, or else any move.

    It depends only on the arguments, so that a game can be repeated.
    """
    rng = random.Random(f"{seed} {stones}")
    return rng.choice(best_moves(stones) if rng.random() < strength else moves(stones))
