"""Training records of a step: its rows with every token, and a reason for every rollout that was left out."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import agentlightning as agl
from agentlightning import semconv
from agentlightning.cli import cli
from agentlightning.plugin.registry import PluginManager
from agentlightning.types import Attempt
from agentlightning_algorithms.grpo.episode import Episode, read_episode
from agentlightning_algorithms.grpo.experience import build_experience, training_spans
from agentlightning_algorithms.grpo.settings import ExperienceSettings
from agentlightning_algorithms.shared.policy.prepared_row import RowUse
from agentlightning_plugins.shared.training_records.query import count_outcomes, read_ledger, read_rows
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN, LedgerEntry, TrainedRow


def _rollout(group: str, index: int, status: Any = "succeeded") -> agl.AttemptedRollout:
    rollout_id = f"ro-{group}{index}"
    attempt = Attempt(rollout_id=rollout_id, attempt_id=f"at-{group}{index}", sequence_id=1, start_time=0.0)
    return agl.AttemptedRollout(
        rollout_id=rollout_id, input="t", start_time=0.0, status=status, metadata={"group": group}, attempt=attempt
    )


def _call(response_id: str, prompt: int = 3, **metadata: Any) -> agl.Triplet:
    return agl.Triplet(
        prompt={"token_ids": list(range(prompt))},
        response={"token_ids": [7, 8], "logprobs": [-0.25, float("-inf")]},
        metadata={"response_id": response_id, "weight_version": 4, **metadata},
    )


def _ledger(episodes: list[Episode], uses: Any = (), **options: Any) -> dict[str, LedgerEntry]:
    settings = ExperienceSettings(**options)
    experience = build_experience(episodes, settings, max_length=50, oldest_version=3)
    failed_reward = settings.failed_reward
    spans = training_spans(experience, 5, episodes=episodes, uses=uses, failed_reward=failed_reward)
    return {span.rollout_id: LedgerEntry.from_span(span) for span in spans if span.name == LEDGER_SPAN}


def test_every_rollout_has_one_outcome_in_the_ledger() -> None:
    pair = [_call("a"), _call("b")]
    episodes = [
        Episode(_rollout("a", 0), 1.0, pair),
        Episode(_rollout("a", 1), 0.0, [_call("c", prompt=60)]),
        Episode(_rollout("a", 2), 0.5, [_call("d", weight_version=1), _call("e", weight_version=1), _call("f", 60)]),
        Episode(_rollout("a", 3), 0.5, [_call("g", finish_reason="length")]),
        Episode(_rollout("a", 4), 0.5, []),
        Episode(_rollout("a", 5), None, [], error="SpansDropped"),
        Episode(_rollout("a", 6), None, [], error="AdapterError"),
        Episode(_rollout("a", 7), None, [_call("h")]),
        Episode(_rollout("a", 8, "failed"), None, [_call("i")], error="LookupError"),
        Episode(_rollout("a", 9), 0.5, [agl.Triplet(prompt={}, response={}, metadata={"response_id": "j"})]),
        Episode(_rollout("b", 0), 1.0, [_call("k")]),
        Episode(_rollout("b", 1), 1.0, [_call("l")]),
    ]
    entries = _ledger(episodes, failed_reward=None, drop_cut_off=True)
    assert [entry.outcome for entry in entries.values()] == [
        "trained",
        "too_long",
        "stale",
        "cut_off",
        "no_calls",
        "spans_dropped",
        "unreadable_spans",
        "no_reward",
        "failed",
        "no_tokens",
        "flat_group",
        "flat_group",
    ]
    assert list(entries) == [episode.rollout.rollout_id for episode in episodes]
    assert entries["ro-a2"].calls == {"d": "stale", "e": "stale", "f": "too_long"}
    assert Counter(entries["ro-a0"].calls.values()) == {"trained": 2}


def test_what_an_agent_wrote_itself_is_counted_and_not_trained_on() -> None:
    attributes = {
        "gen_ai.operation.name": "chat",
        "prompt_token_ids": [1],
        "response_token_ids": [2],
        "logprobs": [-0.5],
        "gen_ai.response.id": "x",
    }
    episodes, rewards = [], {"agentlightning.reward.0.value": 1.0}
    for index, is_own in enumerate([True, False, False]):
        rollout = _rollout("a", index)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        call = agl.Span.from_attributes(attributes=attributes, name="chat", **ids)
        reward = agl.Span.from_attributes(attributes=rewards if index < 2 else {}, name="reward", **ids)
        spans = [semconv.distrust(call) if is_own else call, reward]
        episodes.append(read_episode(rollout, spans, agl.TraceToTriplet()))
    entries = _ledger(episodes, failed_reward=0.0)
    assert [entry.calls for entry in entries.values()] == [{"x": "untrusted"}, {"x": "trained"}, {"x": "trained"}]
    experience = build_experience(episodes, ExperienceSettings(failed_reward=0.0), max_length=50, vocabulary=2)
    assert set(experience.left_out.values()) == {"unreadable_spans"}, "the model cannot embed token 2"


@pytest.mark.parametrize("outcome", ["mismatch", "not_finite"])
def test_a_row_that_the_update_skipped_is_not_counted_as_trained(outcome: Any) -> None:
    episodes = [Episode(_rollout("a", i), float(i), [_call("x")]) for i in range(2)]
    entries = _ledger(episodes, [RowUse(None, 0, outcome), RowUse([-0.25, -1.0], 1, "trained")])
    assert [entry.outcome for entry in entries.values()] == [outcome, "trained"]


def test_a_row_read_from_the_store_has_every_token() -> None:
    episodes = [Episode(_rollout("a", i), float(i), [_call("x")]) for i in range(2)]
    experience = build_experience(episodes, ExperienceSettings(), max_length=50)
    uses = [RowUse([-0.2501, float("nan")], 0, "trained")] * 2
    spans = training_spans(experience, 5, uses=uses, decode=lambda ids: f"<{ids[0]}>")
    span = agl.Span.model_validate_json(spans[0].model_dump_json())
    row = TrainedRow.from_span(span)
    assert (row.prompt_ids, row.response_ids, row.mask) == ([0, 1, 2], [7, 8], [1, 1])
    assert row.logprobs == [-0.25, float("-inf")]
    assert row.trainer_logprobs is not None
    assert row.trainer_logprobs[0] == pytest.approx(-0.2501, abs=1e-6)
    assert (row.step, row.reward, row.calls[0].weight_version, row.texts[8]) == (5, 0.0, 4, "<8>")
    assert row.advantages == pytest.approx([experience.rows[0].advantages[0]] * 2)
    assert json.loads(json.dumps(row.to_json(), allow_nan=False))["logprobs"] == [-0.25, None]


def test_the_arrays_of_a_row_take_at_most_16_bytes_a_token() -> None:
    count = 4000
    row = TrainedRow("ro-1", "at-1", 1, [5], [7] * count, [1] * count, [-1.5] * count, [-1.25] * count, [], 1.0)
    assert len(row.to_span().model_dump_json()) <= 16 * count
    assert TrainedRow.from_span(row.to_span()).trainer_logprobs == [-1.25] * count


async def _fill(file: Path) -> str:
    """Creates a store with a trained, a flat-group, a cancelled and a queued rollout; returns the trained one's id."""
    store = agl.create_store(f"sqlite:///{file}")
    try:
        enqueued = [
            await store.enqueue_rollout(i, mode="train", metadata={"step": 1, "group": f"g{i}"}) for i in range(4)
        ]
        episodes = []
        for rollout in enqueued[:2]:
            claimed = await store.dequeue_rollout()
            assert claimed is not None
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
            episodes.append(Episode(claimed, float(rollout.input), [_call("chatcmpl-1")]))
        experience = build_experience(episodes, ExperienceSettings(keep_flat_groups=True), max_length=50)
        experience.rows, experience.sources = experience.rows[1:], experience.sources[1:]
        experience.left_out[id(episodes[0].triplets[0])] = "flat_group"
        await store.add_many_spans(training_spans(experience, 1, episodes=episodes))
        await store.cancel_rollout(enqueued[2].rollout_id)
        for step in (None, 1):
            entries = await read_ledger(store, step)
            assert [entry.rollout_id for entry in entries] == [rollout.rollout_id for rollout in enqueued]
            assert count_outcomes(entries) == {1: Counter(["trained", "flat_group", "cancelled", "unfinished"])}
        assert await read_ledger(store, 2) == []
        assert len(await read_rows(store, enqueued[1].rollout_id)) == 1
        return enqueued[1].rollout_id
    finally:
        await store.close()


def test_the_ledger_and_tokens_commands_print_training_records(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    trained = asyncio.run(_fill(file))
    PluginManager().hook.add_commands(cli=cli)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli, [*arguments, "--store", f"sqlite:///{file}"])
        assert result.exit_code == 0, result.output
        return result.output

    assert "25%" in run("ledger")
    assert all(outcome in run("ledger", "--step", "1") for outcome in ("trained", "flat_group", "cancelled"))
    assert len(json.loads(run("ledger", "--step", "1", "--json"))) == 4
    assert "-0.2500" in run("tokens", trained)
    (row,) = json.loads(run("tokens", trained, "--json"))
    assert row["response_ids"] == [7, 8]
