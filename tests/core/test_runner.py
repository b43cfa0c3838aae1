from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.errors import StorageFullError, StoreError
from agentlightning.reward import find_final_reward, read_final_reward
from agentlightning.run.thread import STOP_CHECK_S, until_set
from agentlightning.types import AttemptedRollout
from tests.waiting import LIMIT_S, until


@pytest.fixture
async def store() -> AsyncIterator[agl.LightningStore]:
    store = agl.InMemoryLightningStore()
    yield store
    await store.close()


async def run_all(
    store: agl.LightningStore,
    agent: Any,
    inputs: Sequence[Any],
    *,
    config: agl.RolloutConfig | None = None,
    hooks: Sequence[agl.Hook] = (),
    **settings: Any,
) -> list[AttemptedRollout]:
    """Enqueues one rollout for each input, runs the rollouts with one runner, and returns the ended rollouts."""
    for value in inputs:
        await store.enqueue_rollout(value, mode="train", config=config)
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=len(inputs), **settings)
    with runner.run_context(agent=agl.wrap(agent), store=store, hooks=hooks, worker_id="worker"):
        await runner.iter()
    ended = (await store.query_rollouts()).items
    return [rollout for rollout in ended if isinstance(rollout, AttemptedRollout)]


async def reward_of(store: agl.LightningStore, rollout: agl.Rollout) -> float | None:
    return find_final_reward((await store.query_spans(rollout.rollout_id, "latest")).items)


async def test_a_number_returned_by_an_agent_is_its_final_reward(store: agl.LightningStore) -> None:
    rollouts = await run_all(store, lambda task: task / 10, [1, 2, 3])
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * 3
    assert [await reward_of(store, rollout) for rollout in rollouts] == [0.1, 0.2, 0.3]
    assert {rollout.attempt.worker_id for rollout in rollouts} == {"worker"}


def emits(task: int) -> None:
    agl.emit_reward(0.0)
    agl.emit_reward(task / 10)


def emits_and_fails(task: int) -> None:
    emits(task)
    raise ValueError("too late")


def returns_spans(task: int) -> list[agl.Span]:
    agl.emit_reward(0.0)
    return [agl.emit_reward(task / 10, propagate=False), agl.emit_message("done", propagate=False)]


@pytest.mark.parametrize("agent", [lambda task: task / 10, emits, emits_and_fails, returns_spans])
async def test_the_final_reward_is_stored_on_the_attempt(store: agl.LightningStore, agent: Any) -> None:
    (rollout,) = await run_all(store, agent, [5])
    assert rollout.attempt.reward == 0.5
    assert await read_final_reward(store, rollout) == 0.5


async def test_a_reward_that_arrives_after_the_attempt_is_read_from_the_spans(store: agl.LightningStore) -> None:
    (rollout,) = await run_all(store, lambda task: None, [0])
    assert (rollout.attempt.reward, await read_final_reward(store, rollout)) == (None, None)
    late = agl.emit_reward(0.25, propagate=False)
    await store.add_span(
        late.model_copy(update={"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id})
    )
    assert await read_final_reward(store, rollout) == 0.25


async def test_an_exception_of_an_agent_is_recorded_on_the_attempt_and_the_runner_continues(
    store: agl.LightningStore,
) -> None:
    def agent(task: int) -> float:
        if task == 1:
            raise KeyError("no such tool")
        return 1.0

    rollouts = await run_all(store, agent, [0, 1, 2])
    assert [rollout.status for rollout in rollouts] == ["succeeded", "failed", "succeeded"]
    error = rollouts[1].attempt.error
    assert error is not None
    assert (error.type, error.message) == ("KeyError", "'no such tool'")
    header, place, *rest = error.traceback.splitlines()
    assert header.startswith("Traceback")
    assert __file__ in place, "the runner's own frames are left out"
    assert 'raise KeyError("no such tool")' in rest[0]


async def test_a_traceback_begins_with_the_users_code_and_not_with_a_library_that_called_it(
    store: agl.LightningStore,
) -> None:
    @functools.singledispatch
    def agent(task: str) -> float:
        return float(json.loads(task))

    (rollout,) = await run_all(store, agent, ["{"])
    assert rollout.attempt.error is not None
    places = [line for line in rollout.attempt.error.traceback.splitlines() if line.startswith("  File")]
    assert __file__ in places[0], "frames of functools are left out"
    assert "json" in places[-1], "frames of libraries called by the agent are shown"

    *_, rollout = await run_all(store, agl.wrap(functools.partial(json.loads, object_hook=None)), ["{"])
    assert rollout.attempt.error is not None
    places = [line for line in rollout.attempt.error.traceback.splitlines() if line.startswith("  File")]
    assert 0 < len(places) <= 3, "a library's own frames are cut"
    assert "json" in places[-1]


@pytest.mark.parametrize("reward", [np.zeros(3), 0.5j, "0.5", {"reward": 1.0}, []], ids=repr)
async def test_the_error_of_an_attempt_with_an_invalid_reward_names_the_reward_function(
    store: agl.LightningStore, reward: Any
) -> None:
    def exact_match(task: Any, output: Any, rollout: Any) -> Any:
        return reward

    (rollout,) = await run_all(store, agl.wrap(lambda task: "answer", reward=exact_match), [0])
    assert rollout.attempt.error is not None
    message = rollout.attempt.error.message
    assert message.startswith("the reward function ")
    assert message.endswith(
        f"exact_match returned {str(reward)!r} ({type(reward).__name__}); return a number, or a number and a text"
    )


@pytest.mark.parametrize("nonsense", ["text", float("nan"), {"reward": 1}])
async def test_an_invalid_result_fails_its_rollout_with_an_explanation(
    store: agl.LightningStore, nonsense: Any
) -> None:
    (rollout,) = await run_all(store, lambda task: nonsense, [0])
    assert rollout.status == "failed"
    assert rollout.attempt.error is not None
    assert "return" in rollout.attempt.error.message or "finite" in rollout.attempt.error.message
    assert "Traceback" not in rollout.attempt.error.traceback, "no line of the agent raised it"


async def test_an_async_agent_that_hangs_is_cancelled_at_its_timeout(store: agl.LightningStore) -> None:
    cancelled = asyncio.Event()

    async def agent(task: int) -> float:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return 1.0

    (rollout,) = await run_all(store, agent, [0], config=agl.RolloutConfig(timeout_seconds=0.2))
    assert (rollout.status, rollout.attempt.status) == ("failed", "timeout")
    assert cancelled.is_set()


async def test_a_sync_agent_that_hangs_is_stopped_in_its_thread(store: agl.LightningStore) -> None:
    stopped = threading.Event()

    def agent(task: int) -> float:
        try:
            while True:
                time.sleep(0.01)
        finally:
            stopped.set()

    (rollout,) = await run_all(store, agent, [0], config=agl.RolloutConfig(timeout_seconds=0.2))
    assert (rollout.status, rollout.attempt.status) == ("failed", "timeout")
    assert await asyncio.to_thread(stopped.wait, LIMIT_S)


async def test_an_attempt_that_timed_out_is_retried_if_its_config_says_so(store: agl.LightningStore) -> None:
    tries = 0

    async def agent(task: int) -> float:
        nonlocal tries
        tries += 1
        await asyncio.sleep(3600 if tries == 1 else 0)
        return 1.0

    config = agl.RolloutConfig(timeout_seconds=1.0, max_attempts=2, retry_condition=["timeout"])
    await store.enqueue_rollout("task", config=config)
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=2)
    with runner.run_context(agent=agl.wrap(agent), store=store):
        await runner.iter()
    (rollout,) = (await store.query_rollouts()).items
    assert rollout.status == "succeeded"
    attempts = (await store.query_attempts(rollout.rollout_id)).items
    assert [attempt.status for attempt in attempts] == ["timeout", "succeeded"]


async def test_cancelling_a_rollout_stops_its_agent_and_calls_the_last_hook(store: agl.LightningStore) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()
    ends: list[str] = []

    class Recorder(agl.Hook):
        async def on_rollout_end(self, *, rollout: agl.Rollout, **given: Any) -> None:
            ends.append(rollout.rollout_id)

    async def agent(task: int) -> float:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return 1.0

    rollout = await store.enqueue_rollout("task")
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=1)
    with runner.run_context(agent=agl.wrap(agent), store=store, hooks=[Recorder()]):
        running = asyncio.create_task(runner.iter())
        await asyncio.wait_for(started.wait(), LIMIT_S)
        await store.cancel_rollout(rollout.rollout_id)
        await asyncio.wait_for(cancelled.wait(), LIMIT_S)
        await asyncio.wait_for(running, LIMIT_S)
    ended = await store.get_rollout_by_id(rollout.rollout_id)
    assert ended is not None
    assert ended.status == "cancelled"
    assert ends == [rollout.rollout_id]


@pytest.mark.parametrize("is_async", [True, False])
async def test_64_concurrent_rollouts_never_mix_spans_or_rewards(store: agl.LightningStore, is_async: bool) -> None:
    together = threading.Barrier(64)
    arrived = 0
    all_arrived = asyncio.Event()

    def sync_agent(task: int) -> float:
        together.wait(LIMIT_S)
        agl.emit_message(f"message {task}")
        return float(task)

    async def async_agent(task: int) -> float:
        nonlocal arrived
        arrived += 1
        if arrived == 64:
            all_arrived.set()
        await asyncio.wait_for(all_arrived.wait(), LIMIT_S)
        agl.emit_message(f"message {task}")
        return float(task)

    rollouts = await run_all(store, async_agent if is_async else sync_agent, range(64), max_concurrency=64)
    for rollout in rollouts:
        spans = (await store.query_spans(rollout.rollout_id, "latest")).items
        bodies = [
            span.attributes[agl.semconv.MESSAGE_BODY] for span in spans if agl.semconv.MESSAGE_BODY in span.attributes
        ]
        assert bodies == [f"message {rollout.input}"]
        assert find_final_reward(spans) == float(rollout.input)


async def test_an_agent_gets_a_private_copy_of_its_task(store: agl.LightningStore) -> None:
    def agent(task: dict[str, Any]) -> float:
        task["seen"].append(task.pop("answer"))
        return 1.0

    (rollout,) = await run_all(store, agent, [{"answer": 3, "seen": []}])
    assert rollout.status == "succeeded"
    assert rollout.input == {"answer": 3, "seen": []}


async def test_training_and_validation_rollouts_call_separate_methods(store: agl.LightningStore) -> None:
    class Agent(agl.LitAgent[str]):
        def training_rollout(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            return 1.0

        def validation_rollout(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            return 2.0

    runner: agl.LitAgentRunner[str] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=Agent(), store=store):
        train = await runner.step("task", mode="train")
        val = await runner.step("task", mode="val")
    assert (await reward_of(store, train), await reward_of(store, val)) == (1.0, 2.0)


async def test_step_runs_one_task_with_the_given_resources(store: agl.LightningStore) -> None:
    def agent(task: str, greeting: agl.PromptTemplate) -> float:
        return float(greeting.format(name=task) == "Hello Ann")

    runner: agl.LitAgentRunner[str] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=agl.wrap(agent), store=store):
        rollout = await runner.step("Ann", resources={"greeting": "Hello {name}"})
    assert rollout.status == "succeeded"
    assert await reward_of(store, rollout) == 1.0


async def test_a_runner_finishes_its_rollouts_and_stops_soon_after_its_event_is_set(store: agl.LightningStore) -> None:
    stop = threading.Event()

    async def agent(task: int) -> float:
        stop.set()
        await asyncio.sleep(0.3)
        return 1.0

    await store.enqueue_rollout("task")
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), poll_interval=3 * LIMIT_S)
    with runner.run_context(agent=agl.wrap(agent), store=store):
        await asyncio.wait_for(runner.iter(stop), LIMIT_S)
    (rollout,) = (await store.query_rollouts()).items
    assert rollout.status == "succeeded"


async def test_hooks_are_called_in_order_and_a_failing_hook_does_not_fail_the_rollout(
    store: agl.LightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    class Recorder(agl.Hook):
        async def on_rollout_start(self, **given: Any) -> None:
            calls.append(f"start {sorted(given)}")

        async def on_trace_start(self, **given: Any) -> None:
            calls.append(f"trace start {sorted(given)}")
            agl.emit_message("from the hook")
            raise ValueError("a hook's own mistake")

        async def on_trace_end(self, **given: Any) -> None:
            calls.append(f"trace end {sorted(given)}")

        async def on_rollout_end(self, *, spans: Sequence[agl.Span], **given: Any) -> None:
            calls.append(f"end {sorted(given)} {any(span.attributes.get(agl.semconv.MESSAGE_BODY) for span in spans)}")

    (rollout,) = await run_all(store, lambda task: 1.0, [0], hooks=[Recorder()])
    assert rollout.status == "succeeded"
    assert calls == [
        "start ['agent', 'rollout', 'runner']",
        "trace start ['agent', 'rollout', 'runner', 'tracer']",
        "trace end ['agent', 'rollout', 'runner', 'tracer']",
        "end ['agent', 'rollout', 'runner'] True",
    ]
    assert "hook Recorder.on_trace_start failed" in caplog.text


async def test_an_attempt_that_is_stopped_in_its_first_hook_ends_as_failed(store: agl.LightningStore) -> None:
    reached = asyncio.Event()

    class Slow(agl.Hook):
        async def on_rollout_start(self, **given: Any) -> None:
            reached.set()
            await asyncio.sleep(3600)

    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=agl.wrap(lambda task: 1.0), store=store, hooks=[Slow()]):
        rollout = await runner.step("task", event=reached)
    assert rollout.status == "failed"


class Unusual(BaseException):
    """An exception that ``except Exception`` does not catch."""


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    "error",
    [SystemExit(3), GeneratorExit(), asyncio.CancelledError("its own"), Unusual("rare"), StopIteration("early")],
)
async def test_an_agent_that_raises_a_base_exception_fails_only_its_own_rollout(
    store: agl.LightningStore, is_async: bool, error: BaseException
) -> None:
    def sync_agent(task: int) -> float:
        if task == 0:
            raise error
        return 1.0

    async def async_agent(task: int) -> float:
        return sync_agent(task)

    rollouts = await run_all(store, async_agent if is_async else sync_agent, [0, 1])
    assert [rollout.status for rollout in rollouts] == ["failed", "succeeded"]
    failure = rollouts[0].attempt.error
    assert failure is not None
    if not (is_async and isinstance(error, StopIteration)):  # Python converts it to a RuntimeError
        assert (failure.type, failure.message) == (type(error).__name__, str(error))
    assert "raise error" in failure.traceback


async def test_stopped_work_gets_time_to_clean_up() -> None:
    cleaned = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(3 * STOP_CHECK_S)
            cleaned.set()

    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stop.set)
    await until_set(work(), stop)
    assert cleaned.is_set()


async def test_a_heartbeat_reports_running_rollouts_and_abandoned_threads(store: agl.LightningStore) -> None:
    async def is_reported() -> bool:
        worker = await store.get_worker_by_id("worker")
        return worker is not None and worker.heartbeat_stats == {"running": 1, "abandoned_threads": 0}

    async def agent(task: int) -> float:
        await until(is_reported)
        return 1.0

    (rollout,) = await run_all(store, agent, [0], heartbeat_interval=0.05)
    assert rollout.attempt.error is None


def test_the_error_about_a_runner_without_an_agent_names_run_context() -> None:
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with pytest.raises(agl.ConfigError, match="run_context"):
        asyncio.run(runner.iter())
    with pytest.raises(agl.ConfigError, match="max_concurrency = 0"):
        agl.LitAgentRunner(agl.DummyTracer(), max_concurrency=0)


async def test_a_runner_that_missed_a_cancellation_stops_the_rollout_at_its_next_heartbeat() -> None:
    store = agl.InMemoryLightningStore()
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def agent(task: int) -> float:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            stopped.set()
            raise
        return 1.0

    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(
        agl.DummyTracer(), max_rollouts=1, heartbeat_interval=0.05, max_concurrency=2
    )

    async def miss_everything(self: Any) -> None:
        await asyncio.sleep(3600)

    runner._watch_revocations = miss_everything.__get__(runner)  # as with a broken event stream
    rollout = await store.enqueue_rollout(1)
    with runner.run_context(agent=agl.wrap(agent), store=store, worker_id="worker"):
        running = asyncio.create_task(runner.iter())
        await asyncio.wait_for(begun.wait(), LIMIT_S)
        await asyncio.sleep(0.2)
        assert not stopped.is_set()
        await store.cancel_rollout(rollout.rollout_id)
        await asyncio.wait_for(running, LIMIT_S)
    assert stopped.is_set()
    await store.close()


async def test_a_runner_hears_of_a_cancellation_after_its_stream_of_events_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = agl.InMemoryLightningStore()
    subscribe, begun, failures = store.subscribe, asyncio.Event(), [StoreError("no events for 30 s")]

    async def fail_once(*arguments: Any) -> AsyncIterator[Any]:
        if failures:
            raise failures.pop()
        async for event in subscribe(*arguments):
            yield event

    async def agent(task: int) -> None:
        begun.set()
        await asyncio.sleep(3600)

    monkeypatch.setattr(store, "subscribe", fail_once)
    rollout = await store.enqueue_rollout(1)
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=1, heartbeat_interval=3600)
    with runner.run_context(agent=agl.wrap(agent), store=store, worker_id="worker"):
        running = asyncio.create_task(runner.iter())
        await asyncio.wait_for(begun.wait(), LIMIT_S)
        await until(lambda: store._waiters._subscriptions)
        await store.cancel_rollout(rollout.rollout_id)
        await asyncio.wait_for(running, LIMIT_S)
    assert not failures
    await store.close()


async def test_a_long_step_sends_heartbeats() -> None:
    store = agl.InMemoryLightningStore()

    async def agent(task: int) -> float:
        times: set[float | None] = set()

        async def has_seen_three() -> bool:
            worker = await store.get_worker_by_id("worker")
            times.add(None if worker is None else worker.last_heartbeat_time)
            return len(times - {None}) >= 3

        await until(has_seen_three)
        return 1.0

    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), heartbeat_interval=0.05)
    with runner.run_context(agent=agl.wrap(agent), store=store, worker_id="worker"):
        rollouts = await asyncio.gather(runner.step(1), runner.step(2))
    assert [rollout.status for rollout in rollouts] == ["succeeded", "succeeded"]
    await store.close()


@pytest.mark.parametrize("value", ["good", float("nan"), [1.0]])
async def test_a_span_with_a_reward_that_is_not_a_number_does_not_keep_its_attempt_open(
    store: agl.LightningStore, value: Any
) -> None:
    def agent(task: int) -> None:
        agl.emit_annotation({"agentlightning.reward.0.value": value})

    (rollout,) = await run_all(store, agent, [0])
    assert (rollout.status, rollout.attempt.reward) == ("succeeded", None)
    assert await reward_of(store, rollout) is None


async def test_a_runner_cannot_be_used_twice_at_the_same_time(store: agl.LightningStore) -> None:
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=agl.wrap(lambda task: 1.0), store=store):
        with (
            pytest.raises(agl.ConfigError, match="give the class"),
            runner.run_context(agent=agl.wrap(lambda task: 1.0), store=store),
        ):
            pass
        assert (await runner.step(0)).status == "succeeded"


@pytest.mark.parametrize(("fails", "undone"), [("init", []), ("init_worker", ["teardown"])])
async def test_a_runner_whose_tracer_fails_to_start_can_be_used_again(
    store: agl.LightningStore, fails: str, undone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = agl.DummyTracer()
    called: list[str] = []
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(tracer)
    with monkeypatch.context() as broken:
        broken.setattr(tracer, fails, Mock(side_effect=agl.ConfigError("the port is taken")))
        for name in ("teardown", "teardown_worker"):
            broken.setattr(tracer, name, lambda *_, name=name: called.append(name))
        with (
            pytest.raises(agl.ConfigError, match="the port is taken"),
            runner.run_context(agent=agl.wrap(lambda task: 1.0), store=store),
        ):
            pass
    assert called == undone
    with runner.run_context(agent=agl.wrap(lambda task: 1.0), store=store):
        assert (await runner.step(0)).status == "succeeded"


async def test_a_claim_that_is_cancelled_returns_its_rollout_to_the_queue(store: agl.LightningStore) -> None:
    stop, returned = asyncio.Event(), 0
    await store.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=number) for number in range(40)])
    for number in range(40):
        claim = asyncio.create_task(until_set(store.dequeue_many_rollouts(limit=1, worker_id="w", timeout=0), stop))
        for _ in range(1 + number % 7):
            await asyncio.sleep(0)
        claim.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            returned += len(await claim or ())
    await asyncio.sleep(0.1)
    assert (await store.query_rollouts(status_in=["preparing"], limit=0)).total == returned
    assert returned < 40


@pytest.mark.parametrize(
    ("error", "is_idle"),
    [(StoreError("away"), False), (StorageFullError("full"), True)],
    ids=["away while rollouts run", "full"],
)
async def test_a_claim_that_the_store_cannot_take_stops_no_rollout_and_is_made_again(
    error: StoreError, is_idle: bool, monkeypatch: pytest.MonkeyPatch, store: agl.LightningStore
) -> None:
    failed = asyncio.Event()
    claim = store.dequeue_many_rollouts

    async def fail_once(**arguments: Any) -> Any:
        in_flight = (await store.query_rollouts(status_in=["preparing", "running"])).total
        if not failed.is_set() and is_idle == (in_flight == 0):
            failed.set()
            raise error
        return await claim(**arguments)

    async def agent(task: int) -> float:
        await failed.wait()
        return 1.0

    monkeypatch.setattr(store, "dequeue_many_rollouts", fail_once)
    ended = await run_all(store, agent, range(6), poll_interval=0.01)  # more than one claim takes
    assert [rollout.status for rollout in ended] == ["succeeded"] * 6
