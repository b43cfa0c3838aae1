from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.types import Attempt, AttemptFailure
from agentlightning_algorithms.grpo.algorithm import GRPO, _draw
from agentlightning_algorithms.grpo.experience import Episode, build_experience, read_episode, training_spans


def rollout(group: str, index: int, **attempt: Any) -> agl.AttemptedRollout:
    rollout_id, attempt_id = f"ro-{group}{index}", f"at-{group}{index}"
    return agl.AttemptedRollout(
        rollout_id=rollout_id,
        input="task",
        start_time=0.0,
        status="failed" if attempt.get("error") else "succeeded",
        metadata={"group": group},
        attempt=Attempt(rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=1, start_time=0.0, **attempt),
    )


def triplet(n_prompt: int = 3, n_response: int = 2, **response: Any) -> agl.Triplet:
    ids = {"token_ids": list(range(n_response)), "logprobs": [-1.0] * n_response}
    return agl.Triplet(
        prompt={"token_ids": list(range(n_prompt))},
        response={**ids, **response},
        metadata={"response_id": "chatcmpl-1"},
    )


def episodes(group: str, rewards: Sequence[float | None], calls: int = 2) -> list[Episode]:
    return [Episode(rollout(group, i), reward, [triplet()] * calls) for i, reward in enumerate(rewards)]


def test_every_call_of_a_rollout_gets_the_advantage_of_its_rollout() -> None:
    experience = build_experience(episodes("a", [1.0, 0.0]), max_length=100)
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert [row.advantage for row in experience.rows] == pytest.approx([expected, expected, -expected, -expected])


def credited(group: str, credits_R: Sequence[Sequence[float]], final: float = 1.0) -> list[Episode]:
    return [
        Episode(
            rollout(group, i),
            final,
            [triplet().model_copy(update={"reward": value, "metadata": {"credit": "discounted"}}) for value in worth],
        )
        for i, worth in enumerate(credits_R)
    ]


def test_with_a_credit_rule_every_call_is_compared_with_the_rollouts_of_its_group() -> None:
    experience = build_experience(credited("a", [[0.5, 1.5], [0.0, 0.0]]), max_length=100)
    mean, factor = 0.5, 1 / (math.sqrt(0.5) + 1e-6)  # of 1.0 and 0.0, what the rollouts' calls are worth on average
    expected = [(value - mean) * factor for value in (0.5, 1.5, 0.0, 0.0)]
    assert [row.advantage for row in experience.rows] == pytest.approx(expected)


def test_identical_credit_changes_nothing() -> None:
    plain = build_experience(episodes("a", [1.0, 0.0]), max_length=100)
    batch = [*credited("a", [[1.0, 1.0]]), *credited("a", [[0.0, 0.0]], final=0.0)]
    assert [row.advantage for row in build_experience(batch, max_length=100).rows] == pytest.approx(
        [row.advantage for row in plain.rows]
    )


def test_a_reward_that_was_emitted_after_a_call_is_no_credit() -> None:
    batch = episodes("a", [1.0, 0.0])
    batch[0] = Episode(batch[0].rollout, 1.0, [triplet(), triplet().model_copy(update={"reward": 9.0})])
    rows = build_experience(batch, max_length=100).rows
    assert rows[0].advantage == rows[1].advantage


def test_groups_without_spread_give_no_rows_and_are_counted() -> None:
    batch = episodes("a", [1.0, 1.0]) + episodes("b", [1.0, 0.0])
    experience = build_experience(batch, max_length=100)
    assert Counter(episode.group for episode, _ in experience.sources) == {"b": 4}
    assert experience.metrics["groups_without_spread"] == 0.5
    assert experience.metrics["reward"] == 0.75


def test_a_failed_rollout_counts_as_zero_or_is_left_out_as_the_user_says() -> None:
    failed = Episode(rollout("a", 2, error=AttemptFailure(type="KeyError", message="x")), None, [], "KeyError")
    batch = [*episodes("a", [1.0, 1.0]), failed]
    counted = build_experience(batch, max_length=100)
    assert len(counted.rows) == 4
    assert counted.metrics["errors/KeyError"] == 1
    assert counted.metrics["reward"] == pytest.approx(2 / 3)
    left_out = build_experience(batch, max_length=100, failed_reward=None)
    assert left_out.rows == []
    assert left_out.metrics["rollouts_left_out"] == 1


def test_calls_without_tokens_and_calls_too_long_are_left_out_after_the_advantages() -> None:
    batch = episodes("a", [1.0, 0.0])
    batch[0] = Episode(batch[0].rollout, 1.0, [triplet(n_prompt=99), triplet(token_ids=[]), triplet()])
    experience = build_experience(batch, max_length=100)
    assert len(experience.rows) == 3
    assert experience.metrics["calls_too_long"] == 1
    assert experience.metrics["calls_without_tokens"] == 1
    assert experience.rows[0].advantage == pytest.approx(-experience.rows[1].advantage)


def test_an_attempt_that_lost_spans_is_not_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    episode = read_episode(rollout("a", 0, spans_dropped=3), [], agl.TraceToTriplet())
    assert episode.error == "SpansDropped"
    assert "3 of its spans were lost" in caplog.text
    experience = build_experience([episode, *episodes("a", [1.0, 0.0])[1:]], max_length=100)
    assert experience.rows == []


def test_each_row_is_explained_by_a_span_in_its_own_attempt() -> None:
    spans = training_spans(build_experience(episodes("a", [1.0, 0.0], calls=1), max_length=100), step=7)
    assert [(span.rollout_id, span.attempt_id) for span in spans] == [("ro-a0", "at-a0"), ("ro-a1", "at-a1")]
    assert spans[0].attributes["agentlightning.training.step"] == 7
    assert spans[0].attributes["gen_ai.response.id"] == "chatcmpl-1"


def test_tasks_are_drawn_without_repetition_and_as_a_function_of_the_step() -> None:
    dataset = list(range(10, 18))
    drawn = [task for step in range(4) for _, task in _draw(dataset, 2, step, seed=1)]
    assert sorted(drawn) == dataset
    assert _draw(dataset, 2, 3, seed=1) == _draw(dataset, 2, 3, seed=1)
    assert [_draw(dataset, 8, 0, seed=1), _draw(dataset, 8, 0, seed=2)].count(_draw(dataset, 8, 0, seed=1)) == 1
    across_epochs = [task for _, task in _draw(dataset, 12, 0, seed=1)]
    assert Counter(across_epochs).total() == 12
    assert max(Counter(across_epochs).values()) == 2


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rollouts_per_task": 1}, "rollouts_per_task = 1: a group needs at least 2"),
        ({"tasks_per_step": 0}, "tasks_per_step = 0"),
        ({"steps": -1}, "steps = -1"),
        ({"checkpoint_every": 0}, "checkpoint_every = 0"),
        ({"sampling": {"top_p": 0.9}}, "needs the whole distribution"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(agl.ConfigError, match=complaint):
        GRPO(model="nowhere", **settings)


def test_the_schedule_spans_the_steps_and_the_temperature_is_that_of_sampling() -> None:
    algorithm = GRPO(model="nowhere", steps=40, sampling={"temperature": 0.7}, seed=3)
    assert (algorithm.update.total_updates, algorithm.update.temperature, algorithm.update.seed) == (40, 0.7, 3)
    assert algorithm.eval_sampling["temperature"] == 0.0
