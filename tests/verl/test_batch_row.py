"""Conversion of model calls to rows of a batch."""

from __future__ import annotations

import pytest
import torch

import agentlightning as agl
from agentlightning_algorithms.shared.advantage import Scored, compute_advantages
from agentlightning_algorithms.verl.batch_row import (
    BatchRow,
    BuiltRows,
    build_rows,
    cut_row,
    placeholder_row,
    weight_range,
)
from agentlightning_algorithms.verl.controller import VerlEpisode
from agentlightning_algorithms.verl.metrics import RolloutStats, summarize


def call(prompt: list[int], response: list[int], *, version: int = 0, reward: float | None = None) -> agl.Triplet:
    return agl.Triplet(
        prompt={"token_ids": prompt, "raw_content": [], "image_urls": []},
        response={"token_ids": response, "raw_content": [], "logprobs": [-0.5] * len(response)},
        reward=reward,
        metadata={"weight_version": version, "response_id": str(prompt)},
    )


CHAIN = [call([1, 2], [3, 4], reward=0.5), call([1, 2, 3, 4, 5], [6], version=1)]


def test_calls_that_continue_each_others_tokens_become_one_row() -> None:
    (row,) = build_rows(CHAIN, kind="trajectories", max_prompt=9, max_response=9).rows
    assert (row.prompt_ids, row.response_ids, row.response_mask) == ([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])
    assert row.response_logprobs == [-0.5, -0.5, 0.0, -0.5]
    assert [call.weight_version for call in row.calls] == [0, 1]
    assert [row.response_ids[call.start : call.end] for call in row.calls] == [[3, 4], [6]]


def test_each_transition_becomes_a_row() -> None:
    rows = build_rows(CHAIN, kind="transitions", max_prompt=9, max_response=9).rows
    assert [(row.prompt_ids, row.response_ids) for row in rows] == [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])]


def test_a_prompt_that_is_too_long_is_dropped_and_counted() -> None:
    built = build_rows(CHAIN, kind="transitions", max_prompt=4, max_response=9)
    assert [row.prompt_ids for row in built.rows] == [[1, 2]]
    assert built.dropped == {"prompt_too_long": 1}


def test_a_row_that_is_too_long_is_cut_after_a_sampled_token() -> None:
    built = build_rows(CHAIN, kind="trajectories", max_prompt=2, max_response=3)
    (row,) = built.rows
    assert (row.response_ids, row.response_mask, row.response_logprobs) == ([3, 4], [1, 1], [-0.5, -0.5])
    assert built.dropped == {"response_cut": 1}
    assert [(call.name, call.start, call.end) for call in row.calls] == [("[1, 2]", 0, 2)]
    assert built.left_out == {"[1, 2, 3, 4, 5]": "too_long"}


def test_calls_without_tokens_or_logprobs_are_counted() -> None:
    bare = call([1], [2])
    bare.response["logprobs"] = None
    for kind in ("transitions", "trajectories"):
        built = build_rows([call([], []), bare], kind=kind, max_prompt=9, max_response=9)
        assert (built.rows, built.calls) == ([], 2)
        assert built.dropped == {"no_tokens": 1, "no_logprobs": 1}
        assert sorted(built.left_out.values()) == ["no_logprobs", "no_tokens"]


def test_a_response_cut_before_its_first_sampled_token_is_empty() -> None:
    row = BatchRow([1], [2, 3, 4], [0, 0, 1], [0.0, 0.0, -1.0])
    assert cut_row(row, 2)
    assert row.response_ids == []


def test_a_placeholder_row_has_no_token_to_train_on() -> None:
    row = placeholder_row(7)
    assert sum(row.response_mask) == 0
    assert len(row.prompt_ids) == len(row.response_ids) == len(row.response_mask) == len(row.response_logprobs) == 1


def test_the_weight_versions_of_a_rollout_are_reported_as_a_range() -> None:
    rows = build_rows(CHAIN, kind="transitions", max_prompt=9, max_response=9).rows
    assert weight_range(rows, 7) == (0, 1)
    assert weight_range([placeholder_row(0)], 7) == (7, 7)


def test_a_step_without_rollouts_has_no_metrics() -> None:
    assert summarize([]) == {}


def test_rollouts_without_rows_count_in_the_mean_metrics() -> None:
    built = BuiltRows([BatchRow([1], [2] * 10, [1] * 10, [0.0] * 10)], calls=2)
    good = RolloutStats(1.0, True, built=built, queue_s=1.0, run_s=2.0, call_s=(0.5, 1.5))
    bad = RolloutStats(0.0, False, "ValueError", queue_s=3.0, run_s=4.0)
    numbers = summarize([good, bad])
    assert (numbers["reward"], numbers["valid_ratio"], numbers["calls_per_rollout"]) == (0.5, 0.5, 1.0)
    assert (numbers["errors/ValueError"], numbers["queue_s_max"], numbers["call_s"]) == (1.0, 3.0, 1.0)


def test_a_rollout_whose_model_failed_has_no_reward_in_the_metrics() -> None:
    good, failed = RolloutStats(1.0, True, source="easy"), RolloutStats(0.0, False, "model_error", source="easy")
    numbers = summarize([good, failed])
    assert (numbers["reward"], numbers["reward_min"], numbers["reward/easy"]) == (1.0, 1.0, 1.0)
    assert (numbers["rollouts"], numbers["errors/model_error"]) == (2.0, 1.0)
    assert "reward" not in summarize([failed])


@pytest.mark.filterwarnings("ignore")  # of verl's imports
def test_verl_trains_on_the_reward_of_the_rollout_and_knows_the_versions_of_its_weights() -> None:
    from agentlightning_algorithms.verl.agent_loop import episode_to_outputs

    rows = build_rows(CHAIN, kind="transitions", max_prompt=9, max_response=9).rows
    outputs = episode_to_outputs(VerlEpisode(rows, reward=1.0, calls=2), current=1)
    assert [output.reward_score for output in outputs] == [1.0, 1.0]
    assert {(o.extra_fields["min_global_steps"], o.extra_fields["max_global_steps"]) for o in outputs} == {(0, 1)}


@pytest.mark.filterwarnings("ignore")  # of verl's imports
def test_advantages_of_calls_with_credit_equal_the_advantages_of_grpo() -> None:
    from agentlightning_algorithms.verl.advantage import call_advantages

    def credited(turn: int, value: float) -> agl.Triplet:
        bare = CHAIN[turn]
        return bare.model_copy(
            update={"reward": value, "metadata": {**bare.metadata, "credit": "nearest", "turn": f"/{turn}"}}
        )

    values = [(0.0, 1.0), (0.0, 0.0), (0.5, 0.0)]
    rows = [
        build_rows(
            [credited(turn, value) for turn, value in enumerate(own)],
            kind="trajectories",
            max_prompt=9,
            max_response=9,
            reward=1.0,
        ).rows[0]
        for own in values
    ]
    mask = torch.tensor([row.response_mask for row in rows] + [[0, 0, 0, 0]])
    keys = ["g_0_0", "g_1_0", "g_2_0", "g_3_0"]
    found = call_advantages([*(row.credit for row in rows), []], [1.0] * 4, ["g"] * 4, keys, mask, "grpo")
    items = [Scored(value, "g", rollout, turn) for rollout, own in enumerate(values) for turn, value in enumerate(own)]
    expected = compute_advantages(items)
    assert found[:3, 0].tolist() == found[:3, 1].tolist() == pytest.approx(expected[::2])
    assert found[:3, 3].tolist() == pytest.approx(expected[1::2])
    assert found[:, 2].tolist() == [0.0] * 4, "tokens between the calls were not sampled"
    assert found[3].tolist() == [0.0] * 4


def test_every_call_of_a_failed_rollout_gets_the_failed_reward() -> None:
    calls = [call.model_copy(update={"metadata": {**call.metadata, "credit": "x", "turn": None}}) for call in CHAIN]
    (row,) = build_rows(calls, kind="trajectories", max_prompt=9, max_response=9, failed_reward=-1.0).rows
    assert [tuple(credit) for credit in row.credit] == [(0, 2, -1.0, None), (3, 4, -1.0, None)]
    (row,) = build_rows(CHAIN, kind="trajectories", max_prompt=9, max_response=9, reward=1.0).rows
    assert row.credit == []
