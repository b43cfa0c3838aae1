from __future__ import annotations

import pytest

from agentlightning_algorithms.grpo.monitor import TrainingMonitor

HEALTHY = {
    "entropy": 1.0, "response_length": 50.0, "reward": 0.3, "success_rate": 0.3, "groups_without_spread": 0.2,
    "responses_cut_off": 0.0, "approx_kl": 0.01, "clip_fraction": 0.1, "logprob_gap_max": 1e-4, "optimizer_steps": 4.0,
}  # fmt: skip


def watched(*steps: dict[str, float]) -> list[list[str]]:
    watch = TrainingMonitor()
    return [watch.observe({**HEALTHY, **step}) for step in ({}, {}, {}, *steps)][3:]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"entropy": 0.05}, "entropy collapsed: 0.05 nats per token, 1 at the beginning"),
        ({"entropy": 4.0}, "entropy grew from 1 to 4 nats"),
        ({"rollouts_without_calls": 0.25}, "25% of the rollouts ended without a model call that can be trained on"),
        ({"response_length": 120.0}, "answers grew from 50 to 120 tokens without a higher reward"),
        ({"response_length": 10.0}, "answers shrank from 50 to 10 tokens"),
        ({"groups_without_spread": 0.95, "reward": -2.5}, "(equal rewards within each, -2.5 on average)"),
        ({"groups_without_spread": 0.95, "reward": 7.0}, "(equal rewards within each, 7 on average)"),
        (
            {"groups_without_spread": 0.95, "failure_rate": 0.98},
            "of the groups have no spread (nearly every rollout fails)",
        ),
        ({"groups_without_spread": 0.95, "success_rate": 0.98}, "have no spread (nearly every rollout succeeds)"),
        ({"responses_cut_off": 0.7}, "70% of the answers were cut off at max_tokens"),
        ({"approx_kl": 0.5}, "approximate KL 0.5"),
        ({"clip_fraction": 0.6}, "60% of the tokens clipped"),
        ({"logprob_gap_max": 2e-3}, "differ by up to 0.002: the calls were sampled with the run's parameters"),
        (
            {"logprob_gap_max": 2.0, "calls_of_other_sampling": 3.0},
            "differ by up to 2: 3 calls were sampled with a temperature, top_p or top_k other than",
        ),
    ],
)
def test_a_warning_is_returned_once_when_its_condition_begins_to_hold(step: dict[str, float], words: str) -> None:
    first, again, healthy, relapse = watched(step, step, {}, step)
    assert words in first[0]
    assert (len(first), again, healthy) == (1, [], [])
    assert relapse == first


@pytest.mark.parametrize(
    "step",
    [
        {},
        {"entropy": 0.05, "success_rate": 0.95, "reward": 0.95},  # the task is learned
        {"response_length": 120.0, "reward": 0.6},  # longer answers earn more
        {"logprob_gap_max": 2.0, "staleness": 1.0},  # sampled with older weights
    ],
)
def test_normal_steps_cause_no_warning(step: dict[str, float]) -> None:
    assert watched(step, step) == [[], []]


def test_in_bfloat16_only_a_large_gap_is_a_warning() -> None:
    monitor = TrainingMonitor(is_exact=False)
    assert monitor.observe({**HEALTHY, "logprob_gap_max": 0.5}) == []
    assert len(monitor.observe({**HEALTHY, "logprob_gap_max": 1.5})) == 1


def test_a_training_reward_that_rises_while_validation_falls_is_a_sign_of_hacking() -> None:
    good, worse = {"val_reward": 0.5, "reward": 0.4}, {"val_reward": 0.3, "reward": 0.7}
    steps = watched(good, {"reward": 0.6}, worse, {"reward": 0.7}, worse)
    assert [len(step) for step in steps] == [0, 0, 1, 0, 0]
    assert "rose from 0.40 to 0.70 while the validation reward fell from 0.50 to 0.30" in steps[2][0]


def test_after_a_validation_before_the_first_step_rewards_are_compared_with_the_first_steps() -> None:
    watch = TrainingMonitor()
    steps: list[dict[str, float]] = [{"val_reward": 3.0}, {"reward": 2.0}, {"reward": 2.0, "val_reward": 2.0}]
    assert [watch.observe(step) for step in steps] == [[], [], []], "the training reward did not rise from 0"
    assert "rose from 2.33 to 3.00" in watch.observe({"reward": 3.0, "val_reward": 2.0})[0]


def test_a_resumed_monitor_remembers_the_first_steps() -> None:
    watch = TrainingMonitor()
    for _ in range(3):
        watch.observe(HEALTHY)
    resumed = TrainingMonitor()
    resumed.restore(watch.state())
    assert len(resumed.observe({**HEALTHY, "entropy": 0.01})) == 1
    assert resumed.active == 1


def test_a_policy_server_that_idles_while_rollouts_wait_gives_one_hint() -> None:
    monitor = TrainingMonitor()
    busy = {"sampler/idle_fraction": 0.2, "queue_wait_s": 9.0, "rollout_s": 1.0}
    assert monitor.idle_hint(busy) is None
    assert monitor.idle_hint({**busy, "sampler/idle_fraction": 0.8, "queue_wait_s": 0.5}) is None
    assert monitor.idle_hint({"sampler/idle_fraction": 0.8}) is None
    hint = monitor.idle_hint({**busy, "sampler/idle_fraction": 0.8})
    assert hint is not None
    assert "idle for 80% of the sampling while rollouts waited 9.0 s" in hint
    assert "max_concurrency" in hint
    assert monitor.idle_hint({**busy, "sampler/idle_fraction": 0.8}) is None
