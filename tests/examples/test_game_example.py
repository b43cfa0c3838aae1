"""examples/game: rules, opponent, splits and tool of the game of stones, and its agent against a scripted model."""

from __future__ import annotations

from typing import Any

import pytest
from examples.game import problems as game_problems
from examples.game import rules
from examples.game.agent import MAX_CALLS, Game, show
from openai import AsyncOpenAI

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
        game = Game(**{**task, "strength": 1.0})
        while game.won is None:
            game.take(f'{{"count": {rules.best_moves(game.stones)[0]}}}')
        assert game.won


def test_a_perfect_opponent_wins_after_the_first_mistake() -> None:
    game = Game(9, 1.0, 0)
    game.take('{"count": 2}')
    assert game.stones == 4
    while game.won is None:
        game.take('{"count": 1}')
    assert game.won is False


def test_an_illegal_move_changes_nothing() -> None:
    game = Game(2, 1.0, 0)
    for arguments, message in {
        '{"count": 3}': "error: you cannot take 3",
        '{"count": 0}': "error: you cannot take 0",
        '{"count": true}': "error: you cannot take True",
        '{"count": "1"}': "error: you cannot take 1",
        '{"count": 1.0}': "error: you cannot take 1.0",
        "": "error: give a count",
        "[]": "error: give a count",
        "{}": "error: give a count",
    }.items():
        assert game.take(arguments) == message
    assert (game.stones, game.won) == (2, None)


def test_stones_are_shown_in_rows_of_four() -> None:
    assert [show(stones) for stones in (0, 3, 4, 9)] == ["none", "ooo", "oooo", "oooo / oooo / o"]


@pytest.mark.parametrize(("player", "reward"), [("perfect", 1.0), ("illegal", 0.0), ("silent", 0.0)])
async def test_the_reward_of_the_game_is_one_only_for_a_win(
    player: str, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = game_problems.test()[0]
    calls = 0

    def answer(request: Any) -> Answer:
        nonlocal calls
        calls += 1
        stones = request.body["messages"][-1]["content"].count("o")
        if player == "silent":
            return Answer("I give up.")
        return Answer(tool_calls=[("take", {"count": 9 if player == "illegal" else rules.best_moves(stones)[0]})])

    async with (
        AsyncOpenAI(api_key="unset", base_url="http://unset") as client,
        Lab(game_problems.agent, answer, reward=game_problems.reward) as lab,
    ):
        monkeypatch.setattr(game_problems, "client", client)
        (rollout,) = await lab.run(task)
    assert rollout.attempt.error is None
    assert rollout.attempt.reward == reward
    assert calls == {"illegal": MAX_CALLS, "silent": 1}.get(player, calls)
