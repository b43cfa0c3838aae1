"""examples/game: rules, opponent, splits and tool of the game of stones, and the game against a scripted model."""

from __future__ import annotations

from typing import Any

import pytest
from examples.game import problems as game_problems
from examples.game import rules
from examples.game.agent import Game, show

from agentlightning.testing.agent import Lab
from agentlightning_plugins.shared.scripted_model.server import Answer


def test_heaps_of_a_multiple_of_four_stones_are_lost() -> None:
    assert [stones for stones in range(1, 40) if not rules.is_won(stones)] == list(range(4, 40, 4))
    assert rules.best_moves(7) == [3]
    assert rules.best_moves(2) == [2]
    assert rules.best_moves(8) == [1, 2, 3]
    assert rules.moves(2) == [1, 2]


def test_the_splits_share_no_heap_and_every_task_can_be_won() -> None:
    heaps = [
        {task["stones"] for task in make()} for make in (game_problems.train, game_problems.val, game_problems.test)
    ]
    assert max(heaps[0]) < min(heaps[1]) <= max(heaps[1]) < min(heaps[2])
    assert all(stones % 4 for split in heaps for stones in split)
    for task in game_problems.test():
        game, is_over, reward = Game(), False, 0.0
        game.reset({**task, "strength": 1.0}, task["seed"])
        while not is_over:
            _, reward, is_over = game.take(rules.best_moves(game.stones)[0])
        assert reward == 1.0


def _begin(stones: int) -> Game:
    game = Game()
    game.reset({"stones": stones, "strength": 1.0}, 0)
    return game


def test_a_perfect_opponent_wins_after_the_first_mistake() -> None:
    game = _begin(9)
    assert game.take(2) == ("oooo", 0.0, False)
    while (result := game.take(1))[2] is False:
        pass
    assert result[1] == 0.0


def test_an_illegal_move_changes_nothing() -> None:
    game = _begin(2)
    assert game.take(3) == ("error: you cannot take 3", 0.0, False)
    assert game.take(0) == ("error: you cannot take 0", 0.0, False)
    assert game.stones == 2


def test_stones_are_shown_in_rows_of_four() -> None:
    assert [show(stones) for stones in (0, 3, 4, 9)] == ["none", "ooo", "oooo", "oooo / oooo / o"]


@pytest.mark.parametrize(("player", "reward"), [("perfect", 1.0), ("illegal", 0.0), ("silent", 0.0)])
async def test_the_reward_of_the_game_is_one_only_for_a_win(player: str, reward: float) -> None:
    task = game_problems.test()[0]
    calls = 0

    def answer(request: Any) -> Answer:
        nonlocal calls
        calls += 1
        stones = request.body["messages"][-1]["content"].count("o")
        if player == "silent":
            return Answer("I give up.")
        return Answer(tool_calls=[("take", {"count": 9 if player == "illegal" else rules.best_moves(stones)[0]})])

    async with Lab(Game(), answer, reward=None) as lab:
        (rollout,) = await lab.run(task)
    assert rollout.attempt.error is None
    assert rollout.attempt.reward == reward
    assert calls == {"illegal": Game.max_turns, "silent": 1}.get(player, calls)
