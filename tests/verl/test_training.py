"""Real trainings with verl 0.9: Ray, FSDP2, gloo, our gateway, store and runners, an agent that calls a tool."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

import agentlightning as agl
from agentlightning import semconv
from agentlightning.reward import find_final_reward
from agentlightning_algorithms.shared.advantage import Scored, compute_advantages, read_credit
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN, ROW_SPAN, LedgerEntry, TrainedRow

if TYPE_CHECKING:
    from conftest import Training

pytestmark = pytest.mark.slow
STEPS = (1, 2, 3)


def rows_of(training: Training, step: int) -> list[dict[str, Any]]:
    """Returns the rows of a step; of the second try if the step was repeated."""
    rows = [row for row in training.rows if row["step"] == step and not row["padding"]]
    return [row for row in rows if row["life"] == rows[-1]["life"]]


def by_group(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    groups: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        group, session, _ = row["key"].rsplit("_", 2)
        groups[group][session].append(row)
    return groups


def first_advantage(row: dict[str, Any]) -> float:
    return next((a for a, m in zip(row["advantages"], row["response_mask"], strict=True) if m), 0.0)


def test_every_step_is_done_and_reported(trained: Training) -> None:
    assert "is down" not in trained.log, "no server is missed that ended with the training"
    assert set(STEPS) <= set(trained.metrics)
    for step in STEPS:
        assert trained.metrics[step]["training/global_step"] == step
        assert trained.metrics[step]["rollouts"] == 16
        assert math.isfinite(trained.metrics[step]["actor/grad_norm"])


def test_sampler_and_trainer_agree_on_every_token_of_every_step(trained: Training) -> None:
    for step in STEPS:
        assert trained.metrics[step]["training/rollout_probs_diff_max"] < 1e-5
        compared = 0
        for row in rows_of(trained, step):
            for sampled, own, is_sampled in zip(
                row["rollout_log_probs"], row["old_log_probs"], row["response_mask"], strict=True
            ):
                if is_sampled:
                    assert sampled == pytest.approx(own, abs=1e-5)
                    compared += 1
        assert compared > 20


def test_weights_change_and_each_version_is_published(trained: Training) -> None:
    versions = defaultdict(set)
    for rollout in trained.rollouts:
        if rollout.mode == "train":
            for span in trained.spans[rollout.rollout_id]:
                version = span.attributes.get("agentlightning.weight_version")
                if version is not None:
                    versions[rollout.metadata["step"]].add(version)
    assert {step: versions[step] for step in STEPS} == {step: {step - 1} for step in STEPS}
    pinned = [
        {r.resources_id for r in trained.rollouts if r.mode == "train" and r.metadata["step"] == step} for step in STEPS
    ]
    assert all(a.isdisjoint(b) for a, b in pairwise(pinned))
    assert all(trained.metrics[step]["actor/grad_norm"] > 0 for step in STEPS)


def test_the_number_of_optimizer_steps_of_a_batch_does_not_depend_on_its_number_of_rows(trained: Training) -> None:
    assert len({len(rows_of(trained, step)) for step in STEPS}) > 1, "the steps had different numbers of rows"
    for step in STEPS:
        checkpoint = trained.directory / "checkpoints" / f"global_step_{step}" / "actor"
        state = torch.load(checkpoint / "optim_world_size_1_rank_0.pt", weights_only=False)["state"]
        assert {int(slot["step"]) for slot in state.values()} == {step * (4 // 2)}
        assert trained.metrics[step]["optimizer_steps"] == 4 // 2


def test_advantages_of_rows_equal_the_advantages_of_verl_for_whole_rollouts(trained: Training) -> None:
    import numpy
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    for step in STEPS:
        groups = by_group(rows_of(trained, step))
        scores, index, rows = [], [], []
        for group, sessions in groups.items():
            for session in sessions.values():
                scores.append([sum(session[-1]["rm_scores"])])
                index.append(group)
                rows.append(session)
        assert len(rows) == 16
        expected, _ = compute_grpo_outcome_advantage(
            torch.tensor(scores), torch.ones(len(scores), 1), numpy.array(index, dtype=object)
        )
        for (wanted,), session in zip(expected.tolist(), rows, strict=True):
            for row in session:
                assert all(
                    a == pytest.approx(wanted * m, abs=1e-6)
                    for a, m in zip(row["advantages"], row["response_mask"], strict=True)
                )


def test_rewards_are_the_agents_rewards_in_float32(trained: Training) -> None:
    rewards = defaultdict(list)
    for rollout in trained.rollouts:
        if rollout.mode == "train" and rollout.status == "succeeded":
            reward = find_final_reward(trained.spans[rollout.rollout_id])
            rewards[rollout.metadata["group"]].append(0.0 if reward is None else reward)
    seen = 0
    for step in STEPS:
        for group, sessions in by_group(rows_of(trained, step)).items():
            assert all(row["dtypes"]["rm_scores"] == "torch.float32" for s in sessions.values() for row in s)
            if group in rewards and len(rewards[group]) == 4:
                seen += 1
                trained_on = sorted(sum(session[-1]["rm_scores"]) for session in sessions.values())
                assert trained_on == pytest.approx(sorted(rewards[group]), abs=1e-7)
    assert seen == 8, "all groups except those of failing agents"


def test_an_agent_that_crashes_is_counted_and_does_not_stall_training(trained: Training) -> None:
    assert [trained.metrics[step].get("errors/ZeroDivisionError", 0) for step in STEPS] == [4, 0, 4]


def test_a_rollout_whose_agent_returns_nothing_gets_the_failed_reward(trained: Training) -> None:
    silent = {r.metadata["group"] for r in trained.rollouts if r.mode == "train" and r.metadata["task_id"] == 6}
    (sessions,) = [sessions for group, sessions in by_group(rows_of(trained, 2)).items() if group in silent]
    assert [[sum(row["rm_scores"]) for row in session] for session in sessions.values()] == [[0.0]] * 4
    assert trained.metrics[2]["rollouts_without_rows"] == trained.metrics[2]["rollouts_without_reward"] == 4


def test_a_prompt_that_is_too_long_is_dropped_or_refused_and_counted(trained: Training) -> None:
    for step in (1, 3):
        assert trained.metrics[step]["dropped/prompt_too_long"] == 4  # too long for training, but answered
        assert trained.metrics[step]["errors/BadRequestError"] == 4  # too long for the model
        assert trained.metrics[step]["rollouts_without_rows"] == 4


def test_tasks_of_failing_agents_stay_in_the_batch(trained: Training) -> None:
    for step in STEPS:
        assert trained.metrics[step]["valid_ratio"] == (0.75 if step == 2 else 0.5)
        groups = by_group(rows_of(trained, step))
        assert {len(sessions) for sessions in groups.values()} == {4}
        assert len(groups) == 4, "each task has its group, even if its agent failed"


def test_streamed_calls_with_tools_are_trained_on(trained: Training) -> None:
    streamed = [r for r in trained.rollouts if r.mode == "train" and r.metadata["task_id"] == 5]
    assert [rollout.status for rollout in streamed] == ["succeeded"] * 4
    for rollout in streamed:
        calls = [s for s in trained.spans[rollout.rollout_id] if "response_token_ids" in s.attributes]
        assert len(calls) == 3
        assert all(len(s.attributes["logprobs"]) == len(s.attributes["response_token_ids"]) for s in calls)
        assert all(semconv.GEN_AI_TIME_TO_FIRST_CHUNK in s.attributes for s in calls)


def test_calls_of_a_rollout_are_joined_if_their_tokens_continue(trained: Training) -> None:
    joined = [row for step in STEPS for row in rows_of(trained, step) if 0 in row["response_mask"][1:]]
    assert joined
    for row in joined:
        assert row["response_mask"][0] == row["response_mask"][-1] == 1
        observed = [p for p, m in zip(row["rollout_log_probs"], row["response_mask"], strict=True) if not m]
        assert set(observed) == {0.0}


def test_validation_runs_the_whole_set_with_its_own_sampling(trained: Training) -> None:
    for step in (2, 3):
        of_step = [r for r in trained.rollouts if r.mode == "val" and r.metadata["step"] == step]
        assert {r.metadata["task_id"] for r in of_step} == {0, 1}
        assert trained.metrics[step]["val_rollouts"] == 2
        assert not [name for name in trained.metrics[step] if name.startswith("val-")]
        for rollout in of_step:
            temperatures = {
                span.attributes["gen_ai.request.temperature"]
                for span in trained.spans[rollout.rollout_id]
                if "agentlightning.gateway.complete" in span.attributes
            }
            assert temperatures == {0}
    answers = [
        tuple(span.attributes["response_token_ids"])
        for rollout in trained.rollouts
        if rollout.mode == "train" and rollout.metadata["task_id"] == 1 and rollout.metadata["step"] == 1
        for span in trained.spans[rollout.rollout_id]
        if "response_token_ids" in span.attributes
    ]
    assert len(set(answers)) > 1, "training answers are sampled"


def test_a_killed_run_continues_from_its_checkpoint(trained: Training) -> None:
    before, _, after = trained.log.partition("=== killed ===")
    assert "step    2" in before
    assert "step    3" not in before
    assert any(r.status == "cancelled" for r in trained.rollouts), "rollouts of the third step were open"
    assert "step    1" not in after
    assert "step    3" in after
    tasks = {
        step: {r.metadata["task_id"] for r in trained.rollouts if r.mode == "train" and r.metadata["step"] == step}
        for step in STEPS
    }
    assert tasks == {1: {0, 1, 2, 3}, 2: {4, 5, 6, 7}, 3: {0, 1, 2, 3}}, "no task is skipped or repeated"
    assert all(r.status in ("succeeded", "failed", "cancelled") for r in trained.rollouts)


def test_metrics_describe_the_rollouts(trained: Training) -> None:
    expected = (
        "reward reward_std reward_min reward_max reward_median valid_ratio calls_per_rollout drift "
        "queue_s run_s call_s call_s_max sampled_tokens sample_tokens_per_s train_tokens_per_s rows rows_padded "
        "progress"
    ).split()
    for step in STEPS:
        assert set(expected) <= set(trained.metrics[step])
        assert trained.metrics[step]["drift"] == 0.0


def records_of(training: Training, name: str, step: int) -> list[Any]:
    """Returns the spans of a step's training records."""
    spans = [span for spans in training.spans.values() for span in spans if span.name == name]
    return [span for span in spans if span.attributes["agentlightning.training.step"] == step]


def test_the_ledger_of_each_step_has_an_entry_for_every_rollout(trained: Training) -> None:
    for step in STEPS:
        entries = {span.rollout_id: LedgerEntry.from_span(span) for span in records_of(trained, LEDGER_SPAN, step)}
        tasks: dict[str, int] = {
            r.rollout_id: r.metadata["task_id"]
            for r in trained.rollouts
            if r.mode == "train" and r.metadata["step"] == step and r.status in ("succeeded", "failed")
        }
        assert entries.keys() <= tasks.keys()
        assert len(entries) == 16, "all of the batch: 4 tasks with 4 rollouts each"
        counts = Counter(entry.outcome for entry in entries.values())
        reported = {name: value for name, value in trained.metrics[step].items() if name.startswith("outcome/")}
        assert reported == {f"outcome/{name}": count for name, count in counts.items()}
        by_task: dict[int, set[str]] = defaultdict(set)
        for name, entry in entries.items():
            by_task[tasks[name]].add(entry.outcome)
            assert (entry.outcome == "trained") == ("trained" in entry.calls.values())
        assert "trained" in by_task[0 if step != 2 else 4]
        assert by_task[6 if step == 2 else 3] == ({"no_calls"} if step == 2 else {"too_long"})


def test_the_record_of_a_row_has_the_values_that_verl_trained_on(trained: Training) -> None:
    def show(mask: Any, advantages: Any, logprobs: Any) -> tuple[list[int], list[float], list[float]]:
        kept = [round(value, 4) for value, is_kept in zip(logprobs, mask, strict=True) if is_kept]
        return mask, [round(value, 4) for value in advantages], kept

    for step in STEPS:
        rows = [TrainedRow.from_span(span) for span in records_of(trained, ROW_SPAN, step)]
        recorded = sorted(show(row.mask, row.advantages, row.logprobs) for row in rows)
        expected = []
        for sessions in by_group(rows_of(trained, step)).values():
            group = [row for session in sessions.values() for row in session]
            if any(any(row["advantages"]) for row in group):  # a row at the mean of its group is trained on at 0.0
                expected += [show(row["response_mask"], row["advantages"], row["rollout_log_probs"]) for row in group]
        assert recorded == sorted(expected)
        assert rows
        for row in rows:
            assert row.trainer_logprobs is not None
            pairs = zip(row.trainer_logprobs, row.logprobs, row.mask, strict=True)
            assert all(theirs == pytest.approx(ours, abs=1e-4) for theirs, ours, kept in pairs if kept)
            assert {call.weight_version for call in row.calls} == {step - 1}
            assert set(row.texts) == {*row.prompt_ids, *row.response_ids}


def test_metrics_are_reported_per_data_source_and_per_turn(trained: Training) -> None:
    assert {"val_reward/easy", "val_reward/hard"} <= set(trained.metrics[2])
    metrics = trained.metrics[1]
    assert metrics["turn/1/calls"] > metrics["turn/2/calls"] >= metrics["turn/3/calls"] == 4
    assert metrics["turn/2/prompt_length"] > metrics["turn/1/response_length"] > 0
    assert 0 <= metrics["turn/3/cut_off"] <= 1


@pytest.mark.soak  # five more runs of verl
@pytest.mark.parametrize("name", ["ppo", "reinforce", "remax", "rloo"])
def test_other_algorithms_take_a_real_step(variants: dict[str, Training], name: str) -> None:
    training = variants[name]
    metrics = training.metrics[1]
    assert metrics["optimizer_steps"] == 2
    assert metrics["actor/grad_norm"] > 0
    if name != "reinforce":  # in bypass mode the trainer uses the sampler's probabilities
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert any(first_advantage(row) for row in rows_of(training, 1))


@pytest.mark.soak  # five more runs of verl
def test_ppo_trains_its_critic_and_gives_each_token_its_own_advantage(variants: dict[str, Training]) -> None:
    training = variants["ppo"]
    metrics = training.metrics[1]
    assert metrics["critic/grad_norm"] > 0
    assert math.isfinite(metrics["critic/vf_loss"])
    rows = [TrainedRow.from_span(span) for span in records_of(training, ROW_SPAN, 1)]
    assert any(len({value for value in row.advantages if value}) > len(row.calls) for row in rows)


@pytest.mark.soak  # five more runs of verl
def test_rejections_reach_the_loss_in_bypass_mode(variants: dict[str, Training]) -> None:
    assert "actor/rollout_corr/rollout_rs_masked_fraction" in variants["reinforce"].metrics[1]


@pytest.mark.soak  # five more runs of verl
def test_a_reference_model_adds_a_kl_loss(variants: dict[str, Training]) -> None:
    assert "actor/kl_loss" in variants["rloo"].metrics[1]


@pytest.mark.soak  # five more runs of verl
def test_rloo_compares_rollouts_and_not_their_rows(variants: dict[str, Training]) -> None:
    groups = by_group(rows_of(variants["rloo"], 1))
    assert any(len(session) > 1 for sessions in groups.values() for session in sessions.values())
    for sessions in groups.values():
        rewards = {name: sum(session[-1]["rm_scores"]) for name, session in sessions.items()}
        for name, session in sessions.items():
            others = [reward for other, reward in rewards.items() if other != name]
            for row in session:
                assert first_advantage(row) == pytest.approx(rewards[name] - sum(others) / len(others), abs=1e-6)


@pytest.mark.soak  # more runs of verl
def test_remax_subtracts_the_reward_of_one_greedy_rollout_per_task(variants: dict[str, Training]) -> None:
    training = variants["remax"]
    greedy, sampled = {}, defaultdict(list)
    for rollout in training.rollouts:
        reward = find_final_reward(training.spans[rollout.rollout_id])
        calls = [span for span in training.spans[rollout.rollout_id] if semconv.is_gateway_call(span)]
        if all(span.attributes["gen_ai.request.model"] == "policy-greedy" for span in calls):
            assert {span.attributes["gen_ai.request.temperature"] for span in calls} == {0}
            assert rollout.metadata["group"] not in greedy
            greedy[rollout.metadata["group"]] = reward
            (entry,) = [
                LedgerEntry.from_span(span) for span in training.spans[rollout.rollout_id] if span.name == LEDGER_SPAN
            ]
            assert entry.outcome == "baseline"
        else:
            sampled[rollout.metadata["group"]].append(reward)
    assert greedy.keys() == sampled.keys()
    assert {len(rewards) for rewards in sampled.values()} == {3}
    groups = by_group(rows_of(training, 1))
    assert groups.keys() == greedy.keys(), "greedy rollouts are not trained on"
    for group, sessions in groups.items():
        for session in sessions.values():
            for row in session:
                assert first_advantage(row) == pytest.approx(sum(row["rm_scores"]) - greedy[group], abs=1e-6)
    assert training.metrics[1]["greedy_rollouts"] == 2


@pytest.mark.soak  # five more runs of verl
def test_a_credit_rule_gives_the_calls_of_joined_rows_the_advantages_of_grpo(variants: dict[str, Training]) -> None:
    training = variants["credit"]
    adapter = agl.TraceToTriplet(credit="discounted")
    calls = [
        (*read_credit(triplet, 1.0, 0.0), rollout, triplet)
        for rollout in training.rollouts
        for triplet in adapter.adapt(training.spans[rollout.rollout_id])
    ]
    items = [Scored(value, rollout.metadata["group"], rollout.rollout_id, turn) for value, turn, rollout, _ in calls]
    advantages = compute_advantages(items)
    expected: list[float] = []
    for advantage, (*_, triplet) in zip(advantages, calls, strict=True):
        expected += [advantage] * len(triplet.response["token_ids"])
    rows = rows_of(training, 1)
    found = [a for row in rows for a, m in zip(row["advantages"], row["response_mask"], strict=True) if m]
    assert sorted(found) == pytest.approx(sorted(expected), abs=1e-5)
    per_row = [{round(a, 6) for a, m in zip(row["advantages"], row["response_mask"], strict=True) if m} for row in rows]
    assert any(len(values) > 1 for values in per_row), "the calls of one row have different advantages"


@pytest.mark.soak  # five more runs of verl
def test_with_transition_rows_every_call_becomes_a_row(variants: dict[str, Training]) -> None:
    metrics = variants["rloo"].metrics[1]
    assert metrics["rows"] == metrics["calls"] == 3 * (3 + 1)


@pytest.mark.soak  # five more runs of verl
def test_a_batch_with_nothing_to_train_on_is_skipped_and_the_next_is_trained_on(variants: dict[str, Training]) -> None:
    metrics = variants["lora"].metrics
    assert [metrics[step]["skipped"] for step in STEPS] == [1, 0, 0]
    assert metrics[1]["rollouts_without_rows"] == metrics[1]["rollouts"] == 6
    assert [metrics[step]["optimizer_steps"] for step in STEPS] == [0, 2, 2]


@pytest.mark.soak  # five more runs of verl
def test_adapters_are_merged_into_the_samplers_weights_without_rounding(variants: dict[str, Training]) -> None:
    metrics = variants["lora"].metrics
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in (2, 3))
    assert all(metrics[step]["training/rollout_probs_diff_max"] < 1e-5 for step in (2, 3))


@pytest.mark.soak  # five more runs of verl
def test_the_kl_to_the_model_without_its_adapter_is_subtracted_from_the_reward(variants: dict[str, Training]) -> None:
    metrics = variants["lora"].metrics
    assert metrics[2]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert abs(metrics[3]["actor/reward_kl_penalty"]) > 1e-6


def test_the_trained_model_is_exported_and_served(trained: Training, tmp_path: Path) -> None:
    from click.testing import CliRunner
    from safetensors.torch import load_file

    from agentlightning_algorithms.grpo.command import export
    from agentlightning_algorithms.shared.trained_model import serve_model

    exported = tmp_path / "exported"
    refused = CliRunner().invoke(export, [str(trained.directory), str(exported), "--checkpoint", "2"])
    assert "has shards, which can run code when they are read; add --trust if it is yours" in str(refused.exception)
    said = CliRunner().invoke(export, [str(trained.directory), str(exported), "--checkpoint", "2", "--trust"])
    assert said.exit_code == 0, said.output
    shards = trained.directory / "checkpoints" / "global_step_2" / "actor" / "model_world_size_1_rank_0.pt"
    own = torch.load(shards, weights_only=False)
    name = "model.layers.0.self_attn.q_proj.weight"
    weights = own[name].full_tensor() if hasattr(own[name], "full_tensor") else own[name]
    assert torch.equal(load_file(exported / "model.safetensors")[name], weights.bfloat16())
    assert "algorithm | `verl`" in (exported / "README.md").read_text()
    with (
        serve_model(str(exported)) as served,
        openai.OpenAI(base_url=served.endpoint, api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.create(model="policy", prompt=[1, 2, 3], max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    on_cpu = {"trainer.device": "cpu"}
    with pytest.raises(agl.ConfigError, match="adapters or shards; write the whole model with `agl export"):
        agl.VERL(on_cpu, model=str(trained.directory))
    algorithm = agl.VERL(on_cpu, model=str(exported))
    assert algorithm.composed is not None
    assert algorithm.composed.actor_rollout_ref.model.path == str(exported)
