from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy
import pytest

import agentlightning as agl
from agentlightning.plugin.settings import bind_settings
from agentlightning.types import Attempt, AttemptFailure
from agentlightning_algorithms.grpo import training_session
from agentlightning_algorithms.grpo.algorithm import GRPO
from agentlightning_algorithms.grpo.episode import (
    Episode,
    TaskHistory,
    count_staleness,
    describe_episodes,
    fill_rewards,
    finished,
    pass_at_k,
    read_episode,
    shuffled,
    soft_overlong,
    undecided,
)
from agentlightning_algorithms.grpo.experience import Experience, build_experience, training_spans
from agentlightning_algorithms.grpo.monitor import TrainingMonitor
from agentlightning_algorithms.grpo.sampling import distribution
from agentlightning_algorithms.grpo.settings import CheckpointSettings, ExperienceSettings
from agentlightning_algorithms.shared.advantage import Scored, compute_advantages, flat_groups
from agentlightning_algorithms.shared.policy.settings import UpdateSettings
from agentlightning_algorithms.shared.policy.training_row import Distribution, TrainingRow
from agentlightning_plugins.shared.training_records.record import LedgerEntry


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


def build(
    episodes: Sequence[Episode], settings: ExperienceSettings | None = None, *, max_length: int = 100, **options: Any
) -> Experience:
    return build_experience(episodes, settings or ExperienceSettings(), max_length=max_length, **options)


def episodes(group: str, rewards: Sequence[float | None], calls: int = 2) -> list[Episode]:
    return [Episode(rollout(group, i), reward, [triplet()] * calls) for i, reward in enumerate(rewards)]


def test_every_call_of_a_rollout_gets_the_advantage_of_its_rollout() -> None:
    experience = build(episodes("a", [1.0, 0.0]))
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert [row.advantage for row in experience.rows] == pytest.approx([expected, expected, -expected, -expected])


def test_without_a_credit_rule_a_reward_emitted_after_a_call_does_not_change_its_advantage() -> None:
    batch = episodes("a", [1.0, 0.0])
    batch[0] = Episode(batch[0].rollout, 1.0, [triplet(), triplet().model_copy(update={"reward": 9.0})])
    rows = build(batch).rows
    assert rows[0].advantage == rows[1].advantage


def test_groups_without_spread_give_no_rows_and_are_counted() -> None:
    batch = episodes("a", [1.0, 1.0]) + episodes("b", [1.0, 0.0])
    experience = build(batch)
    assert Counter(episode.group for episode, _ in experience.sources) == {"b": 4}
    assert experience.metrics["groups_without_spread"] == 0.5
    assert experience.metrics["groups"] == 2
    assert experience.metrics["group_reward_std"] == 0.25
    kept = build(batch, ExperienceSettings(keep_flat_groups=True))
    assert [row.advantage for row in kept.rows[:4]] == [0, 0, 0, 0]
    assert len(kept.rows) == 8


def test_advantages_are_whitened_over_the_groups_that_are_trained_on() -> None:
    white = ExperienceSettings(estimator="reinforce_plus_plus_baseline")
    spread = episodes("a", [1.0, 0.0])
    flat = [episode for group in "bcdefg" for episode in episodes(group, [1.0, 1.0])]
    alone = [row.advantage for row in build(spread, white).rows]
    assert [row.advantage for row in build([*spread, *flat], white).rows] == pytest.approx(alone)
    assert build(flat, white).rows == []


def test_a_failed_rollout_counts_as_zero_or_is_excluded_by_a_setting() -> None:
    failed = Episode(rollout("a", 2, error=AttemptFailure(type="KeyError", message="x")), None, [], "KeyError")
    batch = [*episodes("a", [1.0, 1.0]), failed]
    counted = build(batch)
    assert len(counted.rows) == 4
    assert counted.metrics["rollouts_filled"] == 1
    assert counted.rows[0].advantage == pytest.approx((1 - 2 / 3) / (math.sqrt(1 / 3) + 1e-6))
    left_out = build(batch, ExperienceSettings(failed_reward=None))
    assert left_out.rows == []
    assert (left_out.metrics["rollouts_left_out"], left_out.metrics["rollouts_filled"]) == (1, 0)
    described = describe_episodes(batch)
    assert (described["errors/KeyError"], described["rollouts_without_reward"]) == (1, 1)
    assert described["reward"] == described["success_rate"] == pytest.approx(2 / 3)
    silent = [*batch, Episode(rollout("a", 9), 1.0)]
    assert (described["rollouts_without_calls"], describe_episodes(silent)["rollouts_without_calls"]) == (0, 1 / 4), (
        silent
    )


def test_metrics_count_a_failed_rollout_with_the_failed_reward() -> None:
    batch = episodes("a", [1.0, None])
    described = describe_episodes(batch, failed_reward=-1.0)
    assert (described["reward"], described["success_rate"], described["failure_rate"]) == (0.0, 0.5, 0.5)
    assert describe_episodes(batch, failed_reward=2.0)["success_rate"] == 0.5, "a failure is never a success"
    left_out = describe_episodes(batch, failed_reward=None)
    assert (left_out["reward"], left_out["success_rate"], left_out["failure_rate"]) == (1.0, 0.5, 0.5)
    assert "reward" not in describe_episodes(batch[1:], failed_reward=None)
    described = describe_episodes([batch[0], Episode(batch[1].rollout, None, [], "model_error")], failed_reward=-1.0)
    assert (described["reward"], described["success_rate"], described["failure_rate"]) == (1.0, 0.5, 0.5)


def test_calls_that_are_too_long_or_lack_tokens_are_dropped_after_advantages_are_computed() -> None:
    batch = episodes("a", [1.0, 0.0])
    batch[0] = Episode(batch[0].rollout, 1.0, [triplet(n_prompt=99), triplet(token_ids=[]), triplet()])
    experience = build(batch)
    assert len(experience.rows) == 3
    assert experience.metrics["calls_too_long"] == 1
    assert experience.metrics["calls_without_tokens"] == 1
    assert experience.rows[0].advantage == pytest.approx(-experience.rows[1].advantage)


def test_an_attempt_that_lost_spans_is_not_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    episode = read_episode(rollout("a", 0, spans_dropped=3), [], agl.TraceToTriplet())
    assert episode.error == "SpansDropped"
    assert "3 of its spans were lost" in caplog.text
    experience = build([episode, *episodes("a", [1.0, 0.0])[1:]])
    assert experience.rows == []


def conversation(turns: int, **metadata: Any) -> list[agl.Triplet]:
    """Returns calls whose tokens continue each other: each prompt adds one token and each answer has two."""
    ids = [0, 1, 2]
    calls = []
    for turn in range(turns):
        answer = [10 + turn, 20 + turn]
        calls.append(
            agl.Triplet(
                prompt={"token_ids": list(ids)},
                response={"token_ids": answer, "logprobs": [-1.0 - turn, -2.0 - turn]},
                metadata={"response_id": f"chatcmpl-{turn}", **metadata},
            )
        )
        ids += [*answer, 99]
    return calls


def merged(batch: list[Episode], **options: Any) -> list[TrainingRow]:
    return build(batch, ExperienceSettings(rows="trajectories"), **options).rows


def test_calls_whose_tokens_continue_each_other_become_one_row() -> None:
    batch = [Episode(rollout("a", i), reward, conversation(2)) for i, reward in enumerate([1.0, 0.0])]
    row, other = merged(batch)
    assert (row.prompt_ids, row.response_ids, row.mask) == ([0, 1, 2], [10, 20, 99, 11, 21], [1, 1, 0, 1, 1])
    assert row.logprobs == [-1.0, -2.0, 0.0, -2.0, -3.0]
    assert row.advantage == pytest.approx(-other.advantage)
    assert row.rollout != other.rollout
    span, _ = training_spans(build(batch, ExperienceSettings(rows="trajectories")), step=1)
    assert list(span.attributes["agentlightning.training.mask"]) == [2, 1, 2]
    assert list(span.attributes["agentlightning.training.response_ids"]) == ["chatcmpl-0", "chatcmpl-1"]


def test_in_a_merged_row_every_call_keeps_its_own_credit() -> None:
    worth = [[0.5, 1.5], [0.0, 0.0]]
    batch = [
        Episode(
            rollout("a", i),
            1.0,
            [
                call.model_copy(update={"reward": value, "metadata": {**call.metadata, "credit": "any", "turn": turn}})
                for turn, (call, value) in enumerate(zip(conversation(2), values, strict=True))
            ],
        )
        for i, values in enumerate(worth)
    ]
    row, _ = merged(batch)
    apart = [row.advantage for row in build(batch).rows]
    assert row.advantages == pytest.approx([apart[0]] * 2 + [apart[1]] * 2)


def test_a_merged_row_that_is_too_long_loses_only_its_last_calls() -> None:
    batch = [Episode(rollout("a", i), reward, conversation(3)) for i, reward in enumerate([1.0, 0.0])]
    experience = build(batch, ExperienceSettings(rows="trajectories"), max_length=9)
    assert [len(row.prompt_ids) + len(row.response_ids) for row in experience.rows] == [8, 8]
    assert experience.metrics["calls_too_long"] == 2
    assert merged(batch, max_length=4) == []


def test_cut_off_and_stale_answers_are_dropped_after_advantages_are_computed() -> None:
    whole = Episode(rollout("a", 0), 1.0, conversation(1, finish_reason="stop", weight_version=4))
    cut_off = Episode(rollout("a", 1), 0.0, conversation(1, finish_reason="length", weight_version=3))
    experience = build([whole, cut_off], ExperienceSettings(drop_cut_off=True))
    assert [row.advantage for row in experience.rows] == pytest.approx([0.5 / math.sqrt(0.5)], rel=1e-4)
    assert experience.metrics["calls_cut_off"] == 1
    experience = build([whole, cut_off], max_length=100, oldest_version=4)
    assert len(experience.rows) == 1
    assert experience.metrics["calls_stale"] == 1
    assert describe_episodes([whole, cut_off])["responses_cut_off"] == 0.5


def test_a_row_has_the_sampling_distribution_of_its_calls_unless_one_is_forced() -> None:
    same, cold = Distribution(0.7), Distribution(0.1, 0.9, 3)
    batch = [
        Episode(rollout("a", i), reward, conversation(2), "", {"chatcmpl-0": same, "chatcmpl-1": second})
        for i, (reward, second) in enumerate([(1.0, same), (0.0, cold)])
    ]
    assert [row.distribution for row in merged(batch)] == [same, same, cold], "a row has one distribution"
    forced = build(batch, distribution=same)
    assert {row.distribution for row in forced.rows} == {None}
    assert forced.metrics["calls_of_other_sampling"] == 1


def test_calls_that_do_not_continue_the_previous_call_are_counted_by_kind() -> None:
    first, second = conversation(2)
    messages = [{"role": "user", "content": "q"}]
    answer = [{"role": "assistant", "content": "a"}]
    history = [*messages, *answer, {"role": "user", "content": "again"}]
    drifted = [
        first.model_copy(
            update={
                "prompt": {**first.prompt, "raw_content": messages},
                "response": {**first.response, "raw_content": answer},
            }
        ),
        second.model_copy(update={"prompt": {"token_ids": [0, 1, 2, 10, 77, 99], "raw_content": history}}),
    ]
    metrics = build([Episode(rollout("a", 0), 1.0, drifted)]).metrics
    assert sum(metrics[f"drift/{kind}"] for kind in ("template", "retokenisation", "other")) == 1


def test_rewards_are_reported_by_source_of_the_task() -> None:
    batch = [
        Episode(rollout("a", i).model_copy(update={"input": {"source": source}}), reward, conversation(1 + i))
        for i, (source, reward) in enumerate([("gsm8k", 1.0), ("gsm8k", 0.0), ("math", 0.5)])
    ]
    described = describe_episodes(batch, success_threshold=0.5)
    assert (described["reward/gsm8k"], described["reward/math"]) == (0.5, 0.5)
    assert described["success_rate"] == pytest.approx(2 / 3)
    assert (described["calls_per_rollout"], described["response_length"]) == (2, 2)


def test_lengths_and_durations_are_reported_with_their_percentiles() -> None:
    batch = []
    for i in range(20):
        attempted = rollout("a", i, end_time=float(i + 1))
        batch.append(Episode(attempted, 1.0, [triplet(n_prompt=i + 1, n_response=2 * (i + 1))]))
    described = describe_episodes(batch)
    for name, unit in (("prompt_length", 1), ("response_length", 2), ("rollout_s", 1)):
        found = [described[f"{name}{suffix}"] for suffix in ("", "_p50", "_p95", "_max")]
        assert found == [10.5 * unit, 10 * unit, 19 * unit, 20 * unit]
    assert describe_episodes([])["response_length_p95"] == 0.0


def test_each_row_is_recorded_as_a_span_of_its_attempt() -> None:
    experience = build(episodes("a", [1.0, 0.0], calls=1))
    spans = training_spans(experience, step=7)
    assert [span.span_id for span in spans] == [span.span_id for span in training_spans(experience, step=7)]
    assert [(span.rollout_id, span.attempt_id) for span in spans] == [("ro-a0", "at-a0"), ("ro-a1", "at-a1")]
    assert spans[0].attributes["agentlightning.training.step"] == 7
    assert not any(map(agl.semconv.is_llm_call, spans)), "a repeated step reads these spans together with the calls"
    assert spans[0].attributes["gen_ai.response.id"] == "chatcmpl-1"


def test_several_rewards_of_rollouts_are_normalised_apart() -> None:
    """The second reward decides between rollouts with an equal first one."""
    found = [
        replace(each, rewards={"win": each.reward or 0.0, "fast": fast})
        for each, fast in zip(episodes("a", [1.0, 1.0], calls=1), (0.0, 0.1), strict=True)
    ]
    with pytest.raises(agl.ConfigError, match="set keep_flat_groups: true"):
        ExperienceSettings(estimator="gdpo")
    experience = build(found, ExperienceSettings(estimator="gdpo", keep_flat_groups=True))
    slow, fast = [row.advantages[0] for row in experience.rows]
    assert fast > 0 > slow


def history(size: int, position: int = 0, *, seed: int = 1, rewards: Any = None) -> TaskHistory:
    return TaskHistory(range(size), position, 0, seed, rewards or {})


def test_tasks_are_drawn_without_repetition_and_depend_only_on_position_and_seed() -> None:
    drawn = [task for step in range(4) for task in shuffled(2, history(8, 2 * step))]
    assert sorted(drawn) == list(range(8))
    assert shuffled(2, history(8, 6)) == shuffled(2, history(8, 6))
    assert shuffled(8, history(8)) != shuffled(8, history(8, seed=2))
    across_epochs = shuffled(12, history(8))
    assert Counter(across_epochs).total() == 12
    assert max(Counter(across_epochs).values()) == 2


def test_undecided_tasks_are_drawn_before_tasks_that_always_or_never_succeed() -> None:
    rewards = {0: [0.5, 1.0], 1: [0.0, None], 2: [1.0, 0.4], 3: [0.9], 4: [None]}
    assert set(undecided(4, history(8, seed=3, rewards=rewards))) <= {2, 4, 5, 6, 7}
    assert set(undecided(5, history(8, seed=3, rewards=rewards))) == {2, 4, 5, 6, 7}
    assert len(undecided(5, history(2, seed=3))) == 5


@pytest.mark.parametrize("sampling", [{"max_tokens": 100}, {"extra_body": {"max_tokens": 100}, "top_p": None}])
def test_answers_near_max_tokens_lose_reward_and_cut_off_answers_are_filtered(sampling: dict[str, Any]) -> None:
    settings = GRPO(model="nowhere", sampling=sampling)
    lengths = (50, 80, 90, 100)
    episodes = [Episode(rollout("g", n), 1.0, [triplet(3, n)]) for n in lengths]
    assert [soft_overlong(episode, [episode], settings) for episode in episodes] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    cut = triplet().model_copy(update={"metadata": {"finish_reason": "length"}})
    mixed = [episodes[0], Episode(rollout("g", 1), 1.0, [cut]), Episode(rollout("g", 2), None)]
    assert list(finished(mixed, settings)) == [episodes[0]]


def test_named_rewards_and_the_age_of_weights_are_reported_as_metrics() -> None:
    spans = []
    for values in ([("win", 0.0), ("fast", 0.5)], [("win", 1.0), ("fast", 0.2)]):
        attributes = {
            f"{agl.semconv.REWARD}.{i}.{key}": given
            for i, pair in enumerate(values)
            for key, given in zip(("name", "value"), pair, strict=True)
        }
        spans.append(
            agl.Span.from_attributes(attributes=attributes, rollout_id="ro-g0", attempt_id="at-g0", name="reward")
        )

    class NoCalls:
        def adapt_attempt(self, *_: Any) -> list[agl.Triplet]:
            return []

    named = read_episode(rollout("g", 0), spans, cast(Any, NoCalls()))
    assert dict(named.rewards) == {"win": 1.0, "fast": 0.2}
    found = describe_episodes([named, Episode(rollout("g", 1), 0.5, rewards={"win": 0.0})])
    assert (found["rewards/win"], found["rewards/fast"]) == (0.5, 0.1), "over the same rollouts"
    calls = [triplet().model_copy(update={"metadata": {"weight_version": version}}) for version in (3, 3, 2)]
    assert count_staleness([Episode(rollout("g", 0), 1.0, calls)], 3) == {"staleness/0": 2.0, "staleness/1": 1.0}


def test_pass_at_k_is_the_chance_that_one_of_k_rollouts_succeeds() -> None:
    rewards = {"a": [1, 0, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 1, 1]}
    episodes = [Episode(rollout(g, i), float(r)) for g, found in rewards.items() for i, r in enumerate(found)]
    expected = {"pass@1": (0.25 + 0 + 1) / 3, "pass@2": (0.5 + 0 + 1) / 3, "pass@4": 2 / 3}
    assert pass_at_k(episodes) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rollouts_per_task": 1}, "rollouts_per_task = 1: a group needs at least 2"),
        ({"tasks_per_step": 0}, "tasks_per_step = 0"),
        ({"steps": 0}, "steps = 0: at least 1"),
        ({"eval_every": -1}, "eval_every = -1"),
        ({"eval_rollouts": 4}, "eval_rollouts = 4 needs a temperature above 0 in eval_sampling"),
        ({"staleness": -1}, "staleness = -1"),
        ({"sampling": {"temprature": 0.7}}, "sampling has no key 'temprature'. Did you mean 'temperature'"),
        ({"eval_sampling": {"max_token": 3}}, "eval_sampling has no key 'max_token'. Did you mean 'max_tokens'"),
        ({"sampling": {"temperature": 0}}, "a group then has no spread"),
        ({"sampling": {"temperature": "hot"}}, "temperature = 'hot'"),
        ({"sampling": {"max_tokens": 0}}, "sampling: max_tokens = 0; a whole number of at least 1 is needed"),
        ({"sampling": {"n": 0}}, "sampling: n = 0; a whole number of at least 1"),
        ({"sampling": {"n": True}}, "sampling: n = True; a whole number"),
        ({"sampling": {"max_completion_tokens": 2.5}}, "max_completion_tokens = 2.5; a whole number"),
        ({"sampling": {"extra_body": {"max_tokens": -1}}}, "max_tokens = -1; a whole number"),
        ({"sampling": {"temperature": math.nan}}, "temperature = nan; a number of at least 0"),
        ({"eval_sampling": {"top_p": 0}}, "eval_sampling: top_p = 0; a number above 0 and at most 1"),
        ({"eval_sampling": {"top_k": -2}}, "eval_sampling: top_k = -2; a whole number of at least -1"),
        ({"eval_sampling": {"min_p": 2}}, "min_p = 2; a number from 0 to 1"),
        ({"max_batch_size": 0}, "max_batch_size = 0"),
        ({"sample_threads": 0}, "sample_threads = 0"),
        ({"rollout_timeout_s": 0}, "rollout_timeout_s = 0"),
        ({"model": "/no/such/model"}, "model = '/no/such/model': there is no such directory"),
        ({"model": "./chekpoint"}, "there is no such directory"),
        ({"model": "."}, "that directory has no config.json"),
        ({"staleness": 1, "update": UpdateSettings(old_logprobs="trainer")}, "nothing corrects for the older weights"),
        ({"sampling": {"top_p": 0.9}}, "needs the whole distribution"),
        ({"sampling": {"extra_body": {"top_k": 5}}}, "needs the whole distribution"),
        ({"sampling": {"min_p": 0.1}}, "min_p = 0.1 changes the distribution of tokens"),
        ({"sampling": {"frequency_penalty": 0.5}}, "frequency_penalty = 0.5 changes the distribution of tokens"),
        ({"sampling": {"presence_penalty": 0.5}}, "presence_penalty = 0.5 changes"),
        ({"sampling": {"repetition_penalty": 1.1}}, "repetition_penalty = 1.1 changes"),
        ({"sampling": {"logit_bias": {"5": 1}}}, "logit_bias = {'5': 1} changes"),
        ({"eval_sampling": {"extra_body": {"repetition_penalty": 1.1}}}, "and the transformers backend lacks it"),
        ({"sampling": {"force": "no"}}, "force = 'no'; true or false is needed"),
        ({"sampling": {"seed": 1}}, "seed = 1 would give all rollouts of a task the same answers"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(agl.ConfigError, match=re.escape(complaint)):
        GRPO(**{"model": "nowhere", **settings})


def test_the_schedule_spans_the_steps_and_the_temperature_comes_from_sampling() -> None:
    algorithm = GRPO(model="nowhere", steps=40, sampling={"temperature": 0.7})
    assert (algorithm.update.total_updates, algorithm.update.temperature) == (40, 0.7)
    assert algorithm.eval_sampling["temperature"] == 0.0


def test_sampler_and_trainer_use_a_temperature_in_extra_body() -> None:
    sampling = {"temperature": 1.0, "extra_body": {"temperature": 0.7, "top_k": -1}}
    algorithm = GRPO(model="nowhere", sampling=sampling, eval_sampling={"extra_body": {"temperature": 0.2}})
    assert distribution(algorithm.sampling)["temperature"] == algorithm.update.temperature == 0.7
    assert algorithm.distribution == Distribution(0.7)
    assert distribution(algorithm.eval_sampling)["temperature"] == algorithm.eval_sampling["temperature"] == 0.2
    assert sampling["extra_body"] == {"temperature": 0.7, "top_k": -1}
    with pytest.raises(agl.ConfigError, match="temperature = 'hot'"):
        GRPO(model="nowhere", sampling={"extra_body": {"temperature": "hot"}})


@pytest.mark.parametrize(("own", "expected"), [(None, 7), (0, 0), (3, 3)])
async def test_the_seed_of_the_run_is_used_unless_the_algorithm_has_one(
    own: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_with: list[Any] = []

    def set_up(**setup: Any) -> None:
        opened_with.append(setup["seed"])
        raise agl.ConfigError("far enough")

    monkeypatch.setattr(training_session, "PolicySetup", set_up)
    algorithm = GRPO(model="nowhere", seed=own)
    store = agl.InMemoryLightningStore()
    algorithm.context = agl.RunContext(store=store, adapter=agl.TraceToTriplet(), seed=7)
    with pytest.raises(agl.ConfigError, match="far enough"):
        await algorithm.run(["task"])
    assert opened_with == [expected]


def test_a_wrong_interval_of_checkpoints_is_refused() -> None:
    with pytest.raises(agl.ConfigError, match="every = 0: at least 1 is needed"):
        CheckpointSettings(every=0)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rows", "experience.rows"),
        ("lr", "update.lr"),
        ("checkpoint_every", "checkpoints.every"),
        ("keep_weights_every", "checkpoints.keep_every"),
        ("temprature_", None),
        ("stalenes", "staleness"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_group_that_has_it(name: str, found: str | None) -> None:
    with pytest.raises(agl.ConfigError, match=f"no setting '{name}'") as error:
        bind_settings(GRPO, {"model": "nowhere", name: 1}, "grpo")
    assert (f"Did you mean '{found}'" in str(error.value)) == (found is not None)


def test_a_failure_is_never_better_than_the_other_rollouts_of_its_group() -> None:
    batch = [*episodes("a", [-0.2, -0.5, -1.0, None]), *episodes("b", [-5.0, None]), *episodes("c", [0.5, None])]
    assert fill_rewards(batch, 0.0) == [-0.2, -0.5, -1.0, -1.0, -5.0, -5.0, 0.5, 0.0]
    assert fill_rewards([*batch, *episodes("d", [None])], 0.0)[-1] == -5.0, "nothing else of its group has a reward"
    assert fill_rewards(batch[:4], None)[-1] is None
    rows = build(batch[:4]).rows
    assert rows[-1].advantage == rows[-3].advantage < rows[0].advantage
    assert describe_episodes(batch[:4])["reward"] == pytest.approx(-2.7 / 4)
    assert [entry.reward for entry in _rewards_in_ledger(batch[:4])] == [-0.2, -0.5, -1.0, -1.0]


def _rewards_in_ledger(batch: Sequence[Episode]) -> list[LedgerEntry]:
    spans = training_spans(Experience(), 1, episodes=batch)
    return [LedgerEntry.from_span(span) for span in spans]


def test_a_warning_names_failures_whose_advantage_is_positive() -> None:
    shaped = [*episodes("a", [0.0, 0.5]), Episode(rollout("a", 2, error=AttemptFailure(type="E", message="x")), 1.0)]
    shaped[2] = replace(shaped[2], triplets=[triplet()])  # a reward_shaping gave the failed rollout a reward
    metrics = {**describe_episodes(shaped), **build(shaped).metrics, "failure_rate": 0.25}
    (text,) = TrainingMonitor().observe(metrics)
    assert text.startswith(f"25% of the rollouts failed or have no reward, and their mean advantage is {1 / 1:+.2g}")
    assert build(episodes("a", [-0.2, -1.0, None])).metrics["advantage_failed"] < 0


@pytest.mark.parametrize(
    ("rewards", "fails_at_zero"), [((-0.2, -1.0), True), ((1.0, 1.0), False)], ids=["costs", "successes"]
)
def test_a_simulated_policy_learns_to_crash_only_if_a_crash_counts_as_zero_among_negative_rewards(
    rewards: tuple[float, float], fails_at_zero: bool
) -> None:
    def learn(rule: Callable[[list[Episode]], list[float | None]]) -> float:
        """Returns the probability of a crash after 300 groups of 8 rollouts of a softmax policy over three answers."""
        draw, logits = numpy.random.default_rng(0), numpy.zeros(3)
        for _ in range(300):
            chances = numpy.exp(logits) / numpy.exp(logits).sum()
            answers = draw.choice(3, 8, p=chances)
            found = rule(episodes("a", [None if answer == 2 else rewards[answer] for answer in answers]))
            scored = [(answer, value) for answer, value in zip(answers, found, strict=True) if value is not None]
            items = [Scored(value, "a", place) for place, (_, value) in enumerate(scored)]
            if not items or flat_groups(items):
                continue
            for (answer, _), advantage in zip(scored, compute_advantages(items), strict=True):
                logits += 0.1 / 8 * advantage * (numpy.eye(3)[answer] - chances)
        return float((numpy.exp(logits) / numpy.exp(logits).sum())[2])

    def lowest(batch: list[Episode]) -> list[float | None]:
        known = [episode.reward for episode in batch if episode.reward is not None]
        return [episode.reward if episode.reward is not None else min(known, default=0.0) for episode in batch]

    ours = learn(lambda batch: fill_rewards(batch, 0.0))
    zero = learn(lambda batch: [episode.reward or 0.0 for episode in batch])
    left_out = learn(lambda batch: fill_rewards(batch, None))
    assert ours < 0.05
    assert (zero > 0.9) == fails_at_zero
    assert left_out > 3 * ours, "a group teaches nothing about rollouts that it leaves out"
    assert (learn(lowest) > 0.3) == (not fails_at_zero), "the lowest reward alone does not discourage a failure"
