"""The baseline algorithm, which only runs the agent: its queue, log and metrics."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any, ClassVar

import pytest

import agentlightning as agl
from agentlightning.testing.algorithm import AlgorithmConformance
from agentlightning_algorithms.shared.rollout_result import RewardCheck
from tests.algorithms.glossary import find_unexplained

TASKS = [{"n": number} for number in range(10)]


def agent(task: dict[str, int]) -> float | None:
    agl.emit_annotation({"seen": task["n"]})
    if task["n"] == 7:
        agl.emit_reward(1.0)
        raise KeyError("no such tool")
    if task["n"] == 8:
        raise TimeoutError("too slow")
    if task["n"] == 9:
        return None
    return task["n"] / 10


def run(algorithm: agl.Baseline, *data: Any, agent: Any = agent) -> agl.LightningStore:
    store = agl.create_store("memory://")
    trainer = agl.Trainer(algorithm=algorithm, store=store, strategy="shm", tracer="dummy", trackers=[])
    assert trainer.fit(agent, *data).status == "succeeded"
    return store


def metrics(store: agl.LightningStore) -> list[dict[str, float]]:
    found = [dict(metrics.values) for metrics in asyncio.run(store.query_metrics()).items]
    assert find_unexplained(name for epoch in found for name in epoch) == set()
    return found


def test_each_epoch_reports_mean_median_failure_rate_and_errors_by_type() -> None:
    first, second = metrics(run(agl.Baseline(n_epochs=2), TASKS[:5], TASKS[5:]))
    assert first == {**second, "progress": 0.5}
    assert first["reward"] == pytest.approx(sum(range(7)) / 100), "failures count as 0, even if they emitted a reward"
    assert first["reward_median"] == pytest.approx(0.15)
    assert first["train_reward"] == pytest.approx(0.2)
    assert first["val_reward"] == pytest.approx(0.22)
    assert first["failure_rate"] == pytest.approx(0.2)
    assert first["rollouts"] == 10
    assert first["rollouts_without_reward"] == 2
    assert {name: count for name, count in first.items() if name.startswith("errors/")} == {
        "errors/KeyError": 1,
        "errors/TimeoutError": 1,
    }


@pytest.mark.parametrize(("split", "n_train"), [(0.0, 0), (0.5, 5), (0.8, 8), (1.0, 10)])
def test_one_dataset_is_split_into_modes(split: float, n_train: int) -> None:
    store = run(agl.Baseline(train_split=split), TASKS)
    modes = [rollout.mode for rollout in asyncio.run(store.query_rollouts()).items]
    assert modes == ["train"] * n_train + ["val"] * (10 - n_train)


def test_a_validation_dataset_on_its_own_is_split_and_two_datasets_are_not() -> None:
    alone = asyncio.run(run(agl.Baseline(), None, TASKS).query_rollouts()).items
    assert [rollout.mode for rollout in alone].count("train") == 5
    both = asyncio.run(run(agl.Baseline(train_split=0.0), TASKS[:2], TASKS[2:3]).query_rollouts()).items
    assert [rollout.mode for rollout in both] == ["train", "train", "val"]


def test_at_most_max_queue_length_rollouts_are_in_flight() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def watched(task: Any) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return 1.0

    run(agl.Baseline(max_queue_length=3), TASKS, agent=watched)
    assert most == 3


def test_the_baseline_waits_for_events_and_not_for_the_polling_interval() -> None:
    run(agl.Baseline(polling_interval=1e6, max_queue_length=1), TASKS)  # would not end


@pytest.mark.parametrize(
    ("verbosity", "shown", "hidden"),
    [
        ("keys", "agentlightning.annotation ['seen']", "{'seen': 3}"),
        ("key_values", "agentlightning.annotation {'seen': 3}", "['seen']"),
        ("none", "succeeded: reward 0.3", "agentlightning.annotation"),
    ],
)
def test_span_verbosity_sets_how_much_of_a_span_is_logged(
    verbosity: Any, shown: str, hidden: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "agentlightning"):
        run(agl.Baseline(span_verbosity=verbosity), TASKS)
    assert shown in caplog.text
    assert hidden not in caplog.text
    assert "KeyError: 'no such tool'" in caplog.text
    assert "epoch 1 of 1: reward 0.21, reward_median 0.15, " in caplog.text
    assert "failure_rate 0.2, rollouts 10, rollouts_without_reward 2, errors/KeyError 1" in caplog.text


def test_the_baseline_logs_that_it_waits_for_rollouts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "agentlightning"):
        run(agl.Baseline(polling_interval=0.05), TASKS[:1], agent=lambda task: time.sleep(0.5))
    assert "waiting for 1 rollouts" in caplog.text


class TestConformance(AlgorithmConformance):
    bad_settings: ClassVar = [{"n_epochs": 0}, {"max_queue_length": 0}, {"train_split": 1.5}]
    is_resumable = True

    @pytest.fixture
    def make_algorithm(self) -> type[agl.Baseline]:
        return agl.Baseline


def test_the_baseline_warns_about_missing_rewards_instead_of_ending_the_run(caplog: pytest.LogCaptureFixture) -> None:
    run(agl.Baseline(), TASKS[:3], agent=lambda task: None)
    assert "none of the first 3 rollouts has a reward: return a number from the agent" in caplog.text
    caplog.clear()
    run(agl.Baseline(), TASKS[:3])
    assert "has a reward" not in caplog.text


def test_a_run_without_rewards_ends_after_its_second_batch_or_16_rollouts() -> None:
    nothing: list[tuple[float | None, str | None]] = [(None, None), (1.0, "KeyError: 'a'")]
    with pytest.raises(agl.LightningError, match="none of the first 2 rollouts has a reward"):
        RewardCheck().add(nothing, is_last=True)
    check = RewardCheck()
    check.add(nothing)
    with pytest.raises(agl.LightningError, match="none of the first 4 .* failed: 2 x KeyError: 'a'"):
        check.add(nothing)
    with pytest.raises(agl.LightningError, match="none of the first 16 rollouts has a reward"):
        RewardCheck().add(nothing * 8)
    check = RewardCheck()
    check.add(nothing)
    check.add([(0.0, None)])
    check.add(nothing, is_last=True)
