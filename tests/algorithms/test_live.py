"""Live learning: trials on a share of the traffic, promotion, rollback, restarts, late rewards."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest

import agentlightning as agl
from agentlightning_algorithms.live.reward_feed import ResultReader
from agentlightning_algorithms.live.trial import make_test, next_margin
from agentlightning_algorithms.shared.live_resources import (
    STATE_NAME,
    LiveIds,
    LiveState,
    read_live_history,
    read_live_state,
)
from agentlightning_plugins.shared.monitoring.runs import read_result
from tests.algorithms.glossary import find_unexplained
from tests.algorithms.live_service import (
    BEGIN,
    FADING,
    GOLDEN,
    GOOD,
    WORSE,
    Service,
    answer,
    run_checks,
    running,
    serving,
)
from tests.waiting import LIMIT_S, until

QUICK: dict[str, Any] = {
    "evidence": 10,
    "check_tasks": 8,
    "check_tolerance": 1.0,
    "share": 0.4,
    "margin": 0.2,
    "refresh_s": 0.03,
}


@pytest.fixture
async def store() -> AsyncIterator[agl.LightningStore]:
    store = agl.InMemoryLightningStore()
    await store.update_resources("tuned", {"prompt": BEGIN})
    yield store
    await store.close()


def propose(*prompts: str | Exception | None) -> Callable[[agl.LiveLearning.Experience], Mapping[str, str] | None]:
    """Returns a proposer with fixed answers."""
    left = iter(prompts)

    def next_one(experience: agl.LiveLearning.Experience) -> Mapping[str, str] | None:
        prompt = next(left, None)
        if isinstance(prompt, Exception):
            raise prompt
        return None if prompt is None else {"prompt": prompt}

    return next_one


def learner(store: agl.LightningStore, *prompts: str | Exception | None, **settings: Any) -> agl.LiveLearning:
    algorithm = agl.LiveLearning(propose(*prompts), **{**QUICK, "max_trials": len(prompts), **settings})
    algorithm.set_store(store)
    return algorithm


async def latest_prompt(store: agl.LightningStore) -> str:
    latest = await store.get_latest_resources()
    assert latest is not None
    prompt = latest.resources["prompt"]
    assert isinstance(prompt, agl.PromptTemplate)
    return prompt.template


async def learn(service: Service, algorithm: agl.LiveLearning, timeout_s: float = LIMIT_S) -> list[LiveState]:
    """Lets an algorithm learn from a service with a runner for its checks, and returns the history."""
    async with running(service.serve(), run_checks(service.store)):
        await asyncio.wait_for(algorithm.run(), timeout_s)
    return await read_live_history(service.store)


async def test_a_better_version_is_checked_tried_on_a_share_of_traffic_and_promoted(store: agl.LightningStore) -> None:
    async with serving(store) as service:
        states = await learn(service, learner(store, GOOD))
        assert [state.phase for state in states] == ["watching", "checking", "trial", "closing", "watching"]
        assert states[2].share == 0.4
        latest = await store.get_latest_resources()
        assert latest is not None
        assert (latest.version_id, await latest_prompt(store), states[-1].stable) == ("tuned@2", GOOD, "tuned@2")
        await until(lambda: service.live.stable == "tuned@2")
        given = service.served.copy()
        await service.serve(20)
        assert service.served - given == {"tuned@2": 20}
    found = await agl.compare_rollouts(store, {"group": "control", "step": 1}, {"group": "treatment", "step": 1})
    assert 0.25 < found.treatment.n / (found.treatment.n + found.control.n) < 0.55
    (metrics,) = await store.query_metrics()
    assert metrics.step == 1
    assert find_unexplained(metrics.values) == set()
    assert metrics.values["live/promoted"] == 1.0
    assert metrics.values["live/treated"] <= found.treatment.n
    assert -QUICK["margin"] / 2 < metrics.values["live/low"] < metrics.values["live/difference"]
    assert metrics.values["live/difference"] == pytest.approx(found.difference, abs=0.2)


async def test_a_bad_version_is_rolled_back_and_no_longer_served(store: agl.LightningStore) -> None:
    async with serving(store) as service:
        states = await learn(service, learner(store, WORSE))
        assert [state.phase for state in states] == ["watching", "checking", "trial", "watching"]
        assert "rolled back" in states[3].note
        assert (await latest_prompt(store), states[3].stable, states[3].candidate) == (BEGIN, "tuned@1", None)
        assert service.served["default.candidate@1"] > 0
        await until(lambda: service.live.trial is None)
        given = service.served.copy()
        await service.serve(50)
        assert service.served - given == {"tuned@1": 50}
    assert (await store.query_metrics())[0].values["live/high"] < 0


async def test_a_promoted_version_that_becomes_worse_is_taken_back_while_the_proposer_works(
    store: agl.LightningStore,
) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def think(experience: agl.LiveLearning.Experience) -> Mapping[str, str] | None:
        if asked.is_set():
            await ended.wait()
            return None
        asked.set()
        return {"prompt": FADING}

    algorithm = agl.LiveLearning(think, **{**QUICK, "control_share": 0.3, "alarm_interval": 2000})
    algorithm.set_store(store)
    async with serving(store) as service, running(run_checks(store), algorithm.run()):
        async with running(service.serve()):
            await until(lambda: service.live.stable == "tuned@2")
        async with running(service.serve(worn=True)):
            await until(lambda: service.live.stable == "tuned@3")
        ended.set()
        await until(lambda: service.live.state is not None and service.live.state.former is None)
        state = service.live.state
    assert await latest_prompt(store) == BEGIN
    watched = [
        (rollout.metadata["group"], rollout.resources_id)
        for rollout in await store.query_rollouts(metadata={"watched": 1})
    ]
    assert set(watched) == {("stable", "tuned@2"), ("former", "tuned@1")}
    assert 0.1 < watched.count(("former", "tuned@1")) / len(watched) < 0.5
    assert state is not None
    assert (state.stable, state.alarms, state.candidate) == ("tuned@3", 1, None)
    assert "the promotion of candidate 1 is taken back: -0." in state.alarm
    assert state.note == f"{state.alarm}; tuned@3 is the stable version"
    values = [metrics.values for metrics in await store.query_metrics()]
    (alarm,) = [each for each in values if "live/alarm" in each]
    assert find_unexplained(alarm) == set()
    assert alarm["live/alarm_difference"] < -0.1
    shown = [each for each in (await read_result(store))["health"] if each["name"] == "Live learning"]
    assert shown == [{"name": "Live learning", "level": "watch", "words": state.alarm}]


async def test_a_learner_that_was_killed_after_an_alarm_takes_the_promotion_back(store: agl.LightningStore) -> None:
    ids, latest = LiveIds(store.run_id), await store.update_resources("tuned", {"prompt": FADING})
    alarmed = LiveState(
        phase="watching", since=store.now(), stable=latest.version_id, trial=1, former="tuned@1", control_share=0.1,
        watched_trial=1, promoted_at=store.now(), alarms=1, alarm="it became worse",
    )  # fmt: skip
    await store.with_run(ids.learner_run_id).update_resources(ids.state_id, {STATE_NAME: alarmed})

    async def is_settled() -> bool:
        found = await read_live_state(store)
        return found is not None and found[0].former is None

    async with running(learner(store, None, max_trials=None).run()):
        await until(is_settled)
    assert await latest_prompt(store) == BEGIN
    (state,) = (await read_live_history(store))[1:]
    assert (state.stable, state.alarms, state.note) == ("tuned@3", 1, "it became worse; tuned@3 is the stable version")


async def test_a_promoted_version_is_no_longer_compared_after_control_s(store: agl.LightningStore) -> None:
    async with serving(store) as service, running(service.serve(), run_checks(store)):
        async with running(learner(store, GOOD, max_trials=None, control_s=0.3).run()):
            await until(lambda: service.live.state is not None and service.live.state.former == "tuned@1")
            await until(lambda: service.live.state is not None and service.live.state.former is None)
        notes = [state.note for state in await read_live_history(store)]
        assert "candidate 1 is no longer compared with tuned@1" in notes
        assert service.live.stable == "tuned@2"


async def test_a_user_keeps_the_version_before_a_promotion_for_a_day(
    store: agl.LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def users() -> set[int]:
        return {user for user in range(2000) if live.pick(key=f"user {user}").resources_id == "tuned@1"}

    await store.update_resources("tuned", {"prompt": GOOD})
    live = agl.LiveResources(store)
    live.stable, live._alive_at = "tuned@2", time.monotonic()
    live.state = LiveState(
        phase="watching", since=0.0, stable="tuned@2", former="tuned@1", control_share=0.1, watched_trial=1
    )
    today = time.time() // 86400 * 86400 + 1.0
    monkeypatch.setattr(time, "time", lambda: today)
    chosen = users()
    assert 140 < len(chosen) < 260
    assert chosen == users()
    assert live.pick(key=f"user {min(chosen)}").metadata.keys() == {"group", "key_hash", "period", "watched"}
    monkeypatch.setattr(time, "time", lambda: today + 86400)
    assert len(chosen & users()) < len(chosen) / 2
    live.stable = "by-hand@1"
    assert users() == set()


async def test_a_version_that_fails_on_recorded_tasks_never_reaches_a_user(store: agl.LightningStore) -> None:
    async with serving(store) as service:
        states = await learn(service, learner(store, "broken", check_tolerance=0.2))
        assert [state.phase for state in states] == ["watching", "checking", "watching"]
        assert "rejected by the offline check" in states[-1].note
        assert set(service.served) == {"tuned@1"}
    checks = await store.query_rollouts(metadata={"group": "check"})
    assert {rollout.resources_id for rollout in checks} == {"default.candidate@1"}
    assert len({rollout.input["n"] for rollout in checks}) == len(checks) == QUICK["check_tasks"]


async def test_failures_in_the_check_reject_a_candidate_even_if_earlier_rewards_were_low(
    store: agl.LightningStore,
) -> None:
    await store.update_resources("tuned", {"prompt": "quality 0.0"})
    async with serving(store) as service:
        states = await learn(service, learner(store, "broken", check_tolerance=0.2))
        assert "8 failed, +0.000 on the 8 with a reward; rejected" in states[-1].note
        assert set(service.served) == {"tuned@2"}


async def test_a_check_without_runners_rejects_the_candidate_and_cancels_its_rollouts(
    store: agl.LightningStore,
) -> None:
    async with serving(store) as service, running(service.serve()):
        await asyncio.wait_for(learner(store, GOOD, check_timeout_s=0.5).run(), LIMIT_S)
        assert "are there runners?" in (await read_live_history(store))[-1].note
    assert {rollout.status for rollout in await store.query_rollouts(metadata={"group": "check"})} == {"cancelled"}


@pytest.mark.parametrize("limit", [{"max_treated": 15}, {"max_trial_s": 0.2}])
async def test_a_trial_that_stays_undecided_keeps_the_stable_version(
    store: agl.LightningStore, limit: dict[str, Any]
) -> None:
    async with serving(store) as service:
        states = await learn(service, learner(store, "quality 0.6 again", margin=0.0, **limit))
        assert "undecided; the stable version stays" in states[-1].note
        assert "max_treated" not in limit or "after 15 against" in states[-1].note
        assert (states[-1].stable, await latest_prompt(store)) == ("tuned@1", BEGIN)
        (metrics,) = await store.query_metrics()
        assert metrics.values["live/promoted"] == 0.0


async def test_a_trial_in_which_the_candidate_gets_no_rewards_ends_and_reports_the_unrated_rollouts(
    store: agl.LightningStore,
) -> None:
    async with serving(store) as service:
        algorithm = learner(store, "unrated 0.6", max_treated=15, reward_timeout_s=0.05)
        states = await learn(service, algorithm)
        assert "of the rollouts without a reward (they differ" in states[-1].note
        assert states[-1].note.endswith("undecided; the stable version stays")
        (metrics,) = await store.query_metrics()
        assert metrics.values["live/treated"] == metrics.values["live/unrated_control"] == 0.0
        assert metrics.values["live/unrated_treatment"] >= 15


async def test_a_crash_counts_as_the_lowest_reward(store: agl.LightningStore) -> None:
    """With negative rewards, 0 for a crash would be better than any reward of the stable version."""
    await store.update_resources("tuned", {"prompt": "penalty 0.9"})
    async with serving(store) as service:
        states = await learn(service, learner(store, "broken penalty", reward_range=(-1.0, 0.0)))
        assert "rolled back" in states[-1].note
        assert (await store.query_metrics())[0].values["live/high"] < 0


def test_margins_and_risks_of_all_trials_add_up_to_at_most_margin_and_risk() -> None:
    first = LiveState(phase="trial", since=0.0, stable="tuned@1", share=0.1)
    settings = agl.LiveLearning(propose(), margin=0.1)
    margins: list[float] = []
    for _ in range(10):
        margins.append(next_margin(settings, first))
        first = first.model_copy(update={"margin_spent": sum(margins)})
    assert margins[:3] == pytest.approx([0.05, 0.025, 0.0125])
    assert sum(margins) < 0.1
    risks = [make_test(settings, first.model_copy(update={"served_trials": n}))._risks[1] for n in range(1, 1000)]
    assert sum(risks) < settings.risk


async def test_results_of_both_groups_are_read_in_the_order_in_which_they_ended(store: agl.LightningStore) -> None:
    groups = ["control"] * 3 + ["treatment", "control"] * 4
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=answer, store=store):
        served = [await runner.step({"n": 1}, metadata={"group": group, "step": 1}) for group in groups]
    reader = ResultReader(store, {"treatment", "control"}, 0.0, 60.0, 60.0, where={"step": 1})
    found, _ = await reader.read_new()
    assert [each.rollout.rollout_id for each in found] == [each.rollout_id for each in served]


async def test_the_horizon_is_the_start_of_the_earliest_rollout_that_may_still_get_a_result(
    store: agl.LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = {"group": "treatment", "step": 1}
    running = await store.start_rollout({"n": 1}, metadata=metadata)
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=answer, store=store):
        await runner.step({"n": 1}, metadata=metadata)
        reader = ResultReader(store, {"treatment", "control"}, 0.0, LIMIT_S, LIMIT_S, where={"step": 1})
        results, horizon = await reader.read_new()
        assert (len(results), horizon) == (1, running.start_time)
        unrated = await runner.step({"n": 1, "late": True}, metadata={"group": "control", "step": 1})
        await store.update_attempt(running.rollout_id, running.attempt.attempt_id, status="failed")
        results, horizon = await reader.read_new()
        assert [result.rollout.rollout_id for result in results] == [running.rollout_id]
        assert horizon == unrated.start_time
        await store.start_rollout({"n": 1}, metadata={"group": "control", "step": 2})  # a rollout of another trial
        hanging = await store.start_rollout({"n": 1}, metadata=metadata)
        assert [reader.count(group) for group in ("treatment", "control")] == [2, 1]
    clock = store.now
    monkeypatch.setattr(store, "now", lambda: clock() + 2 * LIMIT_S)
    # Both timeouts have passed: the rating is too late, and the running rollout has failed.
    results, _ = await reader.read_new()
    assert [(result.rollout.rollout_id, result.reward) for result in results] == [(hanging.rollout_id, 0.0)]
    assert [reader.count(group) for group in ("treatment", "control")] == [3, 1]
    await store.update_attempt(hanging.rollout_id, hanging.attempt.attempt_id, status="succeeded", reward=1.0)
    assert (await reader.read_new())[0] == []
    began = store.now()
    _, horizon = await reader.read_new()
    assert began <= horizon <= store.now()


def hanging_agent(hang: Callable[[], Awaitable[Any]]) -> Any:
    """Makes an agent that earns 1 in 60 % of the tasks; before it returns 0 for a candidate, it awaits ``hang()``."""

    @agl.rollout
    async def agent(task: dict[str, int], prompt: agl.PromptTemplate) -> float:
        reward = float(task["n"] * GOLDEN % 1 < 0.6)
        if not reward and "candidate" in prompt.template:
            await hang()
        return reward

    return agent


async def serve_tasks(live: agl.LiveResources, store: agl.LightningStore, agent: Any, numbers: Iterator[int]) -> None:
    """Serves tasks one after another with the versions that ``live`` picks."""
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=agent, store=store):
        for n in numbers:
            choice = live.pick()
            await runner.step({"n": n}, resources_id=choice.resources_id, metadata=choice.metadata)
            await asyncio.sleep(0.01)


async def test_a_candidate_that_hangs_instead_of_failing_is_not_promoted(store: agl.LightningStore) -> None:
    """Its quality equals the stable version's, but rollouts that earn 0 end late, so the first rewards are all 1."""
    released = asyncio.Event()

    agent = hanging_agent(released.wait)
    numbers = iter(range(100_000))
    algorithm = learner(store, "candidate", check_tasks=0, margin=0.0, max_treated=100)
    async with (
        agl.LiveResources(store, refresh_s=0.2, seed=1) as live,
        running(*(serve_tasks(live, store, agent, numbers) for _ in range(80)), algorithm.run()) as tasks,
    ):
        rewarded: Mapping[str, Any] = {"status_in": ["succeeded"], "metadata": {"group": "treatment", "step": 1}}

        async def looks_better() -> bool:
            assert not tasks[-1].done()
            return len(await store.query_rollouts(**rewarded)) >= 40  # of at least 100 rollouts, of which 60 % earn 1

        await until(looks_better)
        released.set()
        await asyncio.wait_for(tasks[-1], LIMIT_S)
    assert "undecided" in (await read_live_history(store))[-1].note
    assert (await latest_prompt(store)) == BEGIN


async def learn_with_a_late_rating(service: Service, algorithm: agl.LiveLearning) -> list[LiveState]:
    """Lets an algorithm learn; a user of the trial rates only when the candidate gets no more traffic."""

    async def is_closing() -> bool:
        return any(state.phase == "closing" for state in await read_live_history(service.store))

    async def rate() -> None:
        await until(lambda: service.live.trial is not None)
        (rollout,) = await service.serve(1, late=True)
        await until(is_closing)
        await service.live.reward(rollout, 1.0)

    async with running(rate()):
        return await learn(service, algorithm)


async def test_a_candidate_gets_at_most_max_treated_rollouts_while_rewards_are_missing(
    store: agl.LightningStore,
) -> None:
    async with serving(store) as service:
        algorithm = learner(store, "quality 0.6 again", margin=0.0, max_treated=30, reward_timeout_s=LIMIT_S)
        states = await learn_with_a_late_rating(service, algorithm)
    assert [state.phase for state in states] == ["watching", "checking", "trial", "closing", "watching"]
    assert states[-1].note.endswith("undecided; the stable version stays")
    treated = await store.query_rollouts(metadata={"step": 1, "group": "treatment"})
    assert 30 <= len(treated) < 150


async def test_a_candidate_can_be_promoted_after_max_trial_s_by_rewards_that_arrive_later(
    store: agl.LightningStore,
) -> None:
    algorithm = learner(store, GOOD, max_trial_s=LIMIT_S, reward_timeout_s=LIMIT_S)

    async def end_the_trial(service: Service) -> None:
        await until(lambda: service.served["default.candidate@1"] >= 100)
        algorithm.max_trial_s = 0.001

    async with serving(store) as service, running(end_the_trial(service)):
        states = await learn_with_a_late_rating(service, algorithm)
    assert "gets no more traffic" in states[3].note
    assert "promoted as tuned@2" in states[-1].note


async def test_a_rollout_that_takes_longer_than_rollout_timeout_s_counts_as_the_lowest_reward(
    store: agl.LightningStore,
) -> None:
    """A candidate of equal quality hangs where the stable version earns 0. Users rate within ``reward_timeout_s``."""

    agent = hanging_agent(functools.partial(asyncio.sleep, 0.6))
    numbers = iter(range(100_000))
    settings: dict[str, Any] = {"max_treated": 100, "reward_timeout_s": 0.2, "rollout_timeout_s": 0.4}
    algorithm = learner(store, "candidate", check_tasks=0, margin=0.0, **settings)
    async with (
        agl.LiveResources(store, refresh_s=0.2, seed=1) as live,
        running(*(serve_tasks(live, store, agent, numbers) for _ in range(40)), algorithm.run()) as tasks,
    ):
        await asyncio.wait_for(tasks[-1], LIMIT_S)
    assert "undecided" in (await read_live_history(store))[-1].note
    assert (await latest_prompt(store)) == BEGIN


async def test_rewards_that_arrive_later_count_in_a_trial(store: agl.LightningStore) -> None:
    async def rate(service: Service) -> None:
        """Serves users who rate each answer later."""
        while True:
            for rollout in await service.serve(5, late=True):
                good = GOOD in str(await store.get_resources_by_id(rollout.resources_id or ""))
                await asyncio.sleep(0.01)
                await service.live.reward(rollout, 0.9 if good else 0.3)

    async with serving(store) as service, running(rate(service), run_checks(store)):
        await asyncio.wait_for(learner(store, GOOD).run(), LIMIT_S)
        assert await latest_prompt(store) == GOOD


async def test_a_promotion_waits_reward_timeout_s_for_users_who_never_rate(store: agl.LightningStore) -> None:
    async with serving(store) as service, running(service.serve(late=True)):
        states = await learn(service, learner(store, GOOD, reward_timeout_s=1.0))
    assert "promoted as tuned@2" in states[-1].note
    assert states[-1].since - states[-2].since >= 1.0


async def test_a_proposer_that_fails_or_changes_nothing_is_called_again_after_more_evidence(
    store: agl.LightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[agl.LiveLearning.Experience] = []
    answers = iter([RuntimeError("no credit"), None, {"prompt": BEGIN}, {"promt": GOOD}, {"prompt": GOOD}])

    async def think(experience: agl.LiveLearning.Experience) -> Any:
        told.append(experience)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    algorithm = agl.LiveLearning(think, **QUICK, max_trials=1)
    algorithm.set_store(store)
    with caplog.at_level(logging.CRITICAL, "agentlightning"):
        async with serving(store) as service:
            states = await learn(service, algorithm)
    notes = [state.note for state in states]
    assert notes[:5] == [
        "began",
        "the proposer failed: RuntimeError: no credit",
        "the proposer had nothing new",
        "the proposer had nothing new",
        "the proposer failed: ConfigError: proposed promt; there are: prompt",
    ]
    assert list(told[4].notes) == notes[:5]
    begun = [result.rollout.start_time for experience in told for result in experience.results]
    assert begun == sorted(begun)
    assert len(set(begun)) == len(begun) >= 5 * QUICK["evidence"]
    assert {result.reward for result in told[0].results} <= {0.0, 1.0}


async def test_resources_published_from_outside_become_stable_and_end_the_trial(store: agl.LightningStore) -> None:
    algorithm = learner(store, "quality 0.6 again", max_trials=None, margin=0.0)
    async with serving(store) as service, running(service.serve(), run_checks(store), algorithm.run()):
        await until(lambda: service.live.trial is not None)
        await store.update_resources("by-hand", {"prompt": "quality 0.9"})
        await until(lambda: service.live.state is not None and service.live.state.stable == "by-hand@1")
        assert "published from outside" in (await read_live_history(store))[-1].note
        await until(lambda: service.live.stable == "by-hand@1")
        given = service.served.copy()
        await until(lambda: service.served["by-hand@1"] >= given["by-hand@1"] + 10)
        assert set(service.served - given) == {"by-hand@1"}


async def test_a_restarted_learner_continues_the_same_trial(store: agl.LightningStore) -> None:
    async with serving(store) as service, running(service.serve(), run_checks(store)):
        first = learner(store, GOOD, margin=0.0, risk=1e-6)
        async with running(first.run()):
            await until(lambda: service.served["default.candidate@1"] >= 20)
        in_trial = await read_live_history(store)
        assert in_trial[-1].phase == "trial"
        second = learner(store, "quality 0.1 never asked for")
        await asyncio.wait_for(second.run(), LIMIT_S)
        states = await read_live_history(store)
        assert states[: len(in_trial)] == in_trial
        assert [state.phase for state in states[len(in_trial) :]] == ["closing", "watching"]
        assert await latest_prompt(store) == GOOD
        metrics = (await store.query_metrics())[0].values
        assert metrics["live/treated"] >= 8


async def test_a_learner_that_was_down_longer_than_check_timeout_s_still_runs_the_check(
    store: agl.LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = LiveIds(store.run_id)
    async with serving(store) as service:
        await service.serve(10)
        states = store.with_run(ids.learner_run_id)
        candidate = (await states.update_resources(ids.candidate_id, {"prompt": GOOD})).version_id
        checking = LiveState(phase="checking", since=time.time(), stable="tuned@1", candidate=candidate, trial=1)
        await states.update_resources(ids.state_id, {STATE_NAME: checking})
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 600.0)
        async with running(learner(store, None, check_timeout_s=300.0).run()):
            await asyncio.sleep(0.4)  # runners also take time to start
            async with running(run_checks(store)):
                await until(lambda: service.live.state is not None and service.live.state.phase != "checking")
    assert service.live.state is not None
    assert "0 failed, " in service.live.state.note
    assert service.live.state.phase == "trial"


@pytest.mark.parametrize(
    ("rewards", "asked"),
    [
        ({"sql": [0.0, 1.0], "chat": [1.0, 1.0]}, ("tables", 2)),
        ({"sql": [1.0, 1.0], "chat": [0.0, 1.0]}, ("words", 4)),
        ({"sql": [0.9, 0.9], "chat": [0.9, 0.9]}, None),
        ({"chat": [0.2, 0.2]}, ("words", 2)),
    ],
    ids=["bad tables", "good tables", "all good", "no tables"],
)
async def test_proposers_are_chosen_by_the_kind_of_task_and_by_the_rewards(
    store: agl.LightningStore, rewards: dict[str, list[float]], asked: tuple[str, int] | None
) -> None:
    def proposer(name: str) -> Callable[[agl.LiveLearning.Experience], Mapping[str, str]]:
        return lambda experience: {"prompt": f"{name} {len(experience.results)}"}

    results = [
        agl.LiveLearning.Result(agl.Rollout(rollout_id=f"ro-{kind}{n}", input={"kind": kind}, start_time=0.0), reward)
        for kind, group in rewards.items()
        for n, reward in enumerate(group)
    ]
    settings = agl.LiveLearning(
        proposers=[
            {"when": {"task": {"kind": "sql"}, "reward_below": 0.8}, "use": proposer("tables")},
            {"when": {"reward_below": 0.8}, "use": proposer("words")},
        ]
    )
    latest = await store.get_latest_resources()
    assert latest is not None
    experience = agl.LiveLearning.Experience(latest.resources, results, [], store)
    assert callable(settings.propose)
    found = settings.propose(experience)
    assert isinstance(found, Awaitable)
    assert (await found) == (None if asked is None else {"prompt": f"{asked[0]} {asked[1]}"})


def test_a_learner_stops_while_a_synchronous_proposer_works() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def think(experience: agl.LiveLearning.Experience) -> None:
        begun.set()
        may_end.wait(LIMIT_S)
        ended.set()

    async def learn_until_stopped() -> None:
        store = agl.InMemoryLightningStore()
        await store.update_resources("tuned", {"prompt": BEGIN})
        algorithm = agl.LiveLearning(think, **QUICK)
        algorithm.set_store(store)
        async with serving(store) as service, running(service.serve(), algorithm.run()):
            await until(begun.is_set)

    asyncio.run(learn_until_stopped())
    assert not ended.is_set()
    may_end.set()


@pytest.mark.parametrize("writes", range(1, 8))
async def test_a_learner_killed_at_any_write_proposes_once_and_promotes_once(
    store: agl.LightningStore, writes: int
) -> None:
    """The writes are: began, candidate, checking, trial, metrics, promoted, watching."""

    class Killed(BaseException):
        pass

    class Mortal(agl.InMemoryLightningStore):
        left = writes

        async def update_resources(self, resources_id: str, resources: Mapping[str, Any]) -> agl.ResourcesUpdate:
            return await self._die_after(super().update_resources(resources_id, resources))

        async def add_metrics(self, step: int, values: Mapping[str, float]) -> Any:
            return await self._die_after(super().add_metrics(step, values))

        async def _die_after(self, write: Any) -> Any:
            done = await write
            type(self).left -= 1
            if type(self).left == 0:
                raise Killed
            return done

    mortal = Mortal.__new__(Mortal)
    mortal.__dict__.update(store.__dict__)
    asked: list[int] = []

    def think(experience: agl.LiveLearning.Experience) -> Mapping[str, str]:
        asked.append(len(experience.results))
        return {"prompt": GOOD}

    async with serving(store) as service, running(service.serve(), run_checks(store)):
        first = agl.LiveLearning(think, **QUICK, max_trials=1)
        first.set_store(mortal)
        with pytest.raises(Killed):
            await asyncio.wait_for(first.run(), LIMIT_S)
        second = agl.LiveLearning(think, **QUICK, max_trials=1)
        second.set_store(store)
        await asyncio.wait_for(second.run(), LIMIT_S)
    assert len(asked) == 1
    updates = await store.query_resources(resources_id="tuned")
    assert [update.version for update in updates] == [1, 2]
    assert await latest_prompt(store) == GOOD
    assert len(await store.query_rollouts(metadata={"group": "check"})) == QUICK["check_tasks"]


async def test_without_a_learner_every_task_gets_the_stable_version(store: agl.LightningStore) -> None:
    async with serving(store, learner_timeout_s=0.4) as service:
        undecided = learner(store, BEGIN + " b", margin=0.0, risk=1e-6)
        async with running(service.serve(), run_checks(store), undecided.run()):
            await until(lambda: service.served["default.candidate@1"] >= 5)
        await until(lambda: service.live.trial is None)
        assert (await read_live_history(store))[-1].phase == "trial"
        assert service.live.pick().metadata == {"group": "stable"}
        given = service.served.copy()
        await service.serve(30)
        assert service.served - given == {"tuned@1": 30}
        async with serving(store, refresh_s=0.02) as newcomer:  # it has never seen a heartbeat change
            await asyncio.sleep(0.1)
            assert newcomer.live.trial is None


async def test_a_second_learner_of_a_run_is_refused(store: agl.LightningStore) -> None:
    async with serving(store) as service, running(service.serve(), run_checks(store)):
        both = []
        for name in "ab":
            prompts = [f"{BEGIN} {name} {n}" for n in range(99)]
            algorithm = learner(store, *prompts, check_tasks=0, margin=0.0, max_treated=15, risk=1e-6)
            both.append(asyncio.create_task(algorithm.run()))
            await until(lambda: service.live.trial is not None)
        (refused,), (other,) = await asyncio.wait(both, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(agl.ConflictError, match="another learner works on run 'default'"):
            await refused
        decided = len(await store.query_metrics())
        while len(await store.query_metrics()) < decided + 3:
            assert not other.done(), await other
            await asyncio.sleep(0.05)
        other.cancel()


async def test_a_user_gets_the_same_version_throughout_a_trial(store: agl.LightningStore) -> None:
    async with (
        serving(store) as service,
        running(service.serve(), run_checks(store), learner(store, BEGIN + " b", margin=0.0).run()),
    ):
        await until(lambda: service.live.trial is not None)
        picked = {f"user-{n}": service.live.pick(f"user-{n}") for n in range(200)}
        assert {user: service.live.pick(user) for user in picked} == picked
        treated = sum(choice.metadata["group"] == "treatment" for choice in picked.values())
        assert 0.25 < treated / len(picked) < 0.55
        hashes = {user: choice.metadata["key_hash"] for user, choice in picked.items()}
        assert len(set(hashes.values())) == len(picked)
        assert not any("user" in hashed for hashed in hashes.values())


async def test_learning_without_published_resources_is_refused() -> None:
    store = agl.InMemoryLightningStore()
    with pytest.raises(agl.ConfigError, match="nothing to improve"):
        await learner(store, GOOD).run()
    async with agl.LiveResources(store) as live:
        assert live.pick().resources_id is None
        with pytest.raises(agl.NotFoundError, match="ro-unknown"):
            await live.reward("ro-unknown", 1.0)
    assert await read_live_state(store) is None
    await store.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"share": 0.0}, "share = 0.0: a number between 0 and 1"),
        ({"risk": 1.0}, "risk = 1.0"),
        ({"evidence": 0}, "evidence = 0: at least 1"),
        ({"max_trials": 0}, "max_trials = 0"),
        ({"margin": -0.1}, "margin = -0.1: at least 0"),
        ({"max_trial_s": 0}, "max_trial_s = 0: more than 0"),
        ({"reward_timeout_s": 0}, "reward_timeout_s = 0: more than 0"),
        ({"reward_range": (1.0, 1.0)}, "reward_range"),
        ({"propose": "no_such_module:function"}, "propose = 'no_such_module:function'"),
        ({"propose": "baseline"}, r"Baseline has no propose\(experience\), as apo has"),
        ({"propose": None}, "give propose, or several as proposers, and not both"),
        ({"proposers": [{"use": propose(GOOD)}]}, "give propose, or several as proposers, and not both"),
        (
            {"propose": None, "proposers": [{"when": {"kind": "sql"}, "use": "json:loads"}]},
            "give use, and in when any of",
        ),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(agl.ConfigError, match=message):
        agl.LiveLearning(**{"propose": propose(GOOD), **wrong})
    assert agl.LiveLearning("json:loads").propose is not None


async def test_each_result_is_read_once(store: agl.LightningStore) -> None:
    results = ResultReader(store, groups={"stable"}, since=0.0, reward_timeout_s=0.3, rollout_timeout_s=60.0)
    async with serving(store) as service:
        first = await service.serve(3)
        assert [r.rollout.rollout_id for r in (await results.read_new())[0]] == [r.rollout_id for r in first]
        second = await service.serve(2)
        (silent,) = await service.serve(1, late=True)
        assert [r.rollout.rollout_id for r in (await results.read_new())[0]] == [r.rollout_id for r in second]
        assert (await results.read_new())[0] == []
        await asyncio.sleep(0.3)
        assert (await results.read_new())[0] == []
        assert results.unrated == {"stable": 1}
        await service.live.reward(silent, 1.0)
        assert (await results.read_new())[0] == []


async def test_an_error_of_the_heartbeat_ends_the_learner(
    store: agl.LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **settings: Any) -> Any:
        raise ValueError("a field is missing")

    monkeypatch.setattr(store, "update_worker", fail)
    with pytest.raises(ValueError, match="a field is missing"):
        await asyncio.wait_for(learner(store, GOOD).run(), LIMIT_S)


async def test_a_service_keeps_following_the_store_after_unreadable_answers(
    store: agl.LightningStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, failures = store.get_latest_resources, [ValueError("a field is missing")] * 3

    async def fail() -> Any:
        if failures:
            raise failures.pop()
        return await read()

    async with agl.LiveResources(store, refresh_s=0.02) as live:
        monkeypatch.setattr(store, "get_latest_resources", fail)
        await store.update_resources("tuned", {"prompt": GOOD})
        await until(lambda: live.pick().resources_id == "tuned@2")
    assert caplog.text.count("cannot be read (logged once): ValueError: a field is missing") == 1
