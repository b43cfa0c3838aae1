"""An agent's late and open spans, threads, timeouts and lost evidence change no training data of others."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.testing.agent import Lab, ask
from agentlightning_algorithms.grpo.episode import Episode, describe_episodes, read_episode
from agentlightning_algorithms.grpo.experience import build_experience, training_spans
from agentlightning_algorithms.grpo.settings import ExperienceSettings
from agentlightning_algorithms.shared.rollout_result import RewardCheck
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN, LedgerEntry
from tests.core.trace_recorder import Recorder
from tests.plugins.gateway.gateway_setup import HELLO, entry, gateway


async def run(agent: Any, tracer: Any = None) -> tuple[agl.AttemptedRollout, Sequence[agl.Span]]:
    """Runs an agent once; returns the rollout, and its spans after late ones had time to arrive."""
    store = agl.InMemoryLightningStore()
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(tracer or agl.OtelTracer())
    with runner.run_context(agent=agl.wrap(agent), store=store):
        rollout = await runner.step("task")
        for _ in range(20):
            await asyncio.sleep(0.01)
    spans = (await store.query_spans(rollout.rollout_id)).items
    await store.close()
    assert isinstance(rollout, agl.AttemptedRollout)
    return rollout, spans


def marks(spans: Sequence[agl.Span]) -> dict[str, list[str]]:
    known = (semconv.UNFINISHED, semconv.LATE)
    return {span.name: [mark for mark in known if mark in span.attributes] for span in spans}


async def test_late_spans_are_stored_and_marked_and_open_spans_are_ended_with_their_attempt() -> None:
    left: list[Any] = []

    async def agent(task: str) -> float:
        async def forgotten() -> None:
            with agl.operation(name="open"):
                await asyncio.sleep(0.05)
            agl.emit_reward(0.0)

        left.append(asyncio.create_task(forgotten()))
        await asyncio.sleep(0)
        return 1.0

    for tracer in (agl.OtelTracer(), agl.DummyTracer()):
        rollout, spans = await run(agent, tracer)
        assert (rollout.status, rollout.attempt.spans_dropped) == ("succeeded", 0)
        rewards = [span for span in spans if span.name == semconv.SPAN_REWARD]
        assert [agl.get_reward_value(span) for span in rewards] == [1.0, 0.0]
        assert [semconv.LATE in span.attributes for span in rewards] == [False, True]
        assert agl.find_final_reward(spans) == rollout.attempt.reward == 1.0
        others = marks([span for span in spans if span not in rewards])
        assert others == {semconv.SPAN_OPERATION: [semconv.UNFINISHED], semconv.SPAN_ROLLOUT: []}
        assert len(spans) == 4, "the end of the operation after the attempt stores it no second time"
        assert agl.TraceToTriplet().adapt_attempt(rollout.attempt, spans) == []


@pytest.mark.environment("main")
async def test_a_stream_that_an_agent_stops_reading_leaves_the_attempt_in_the_training_data() -> None:
    streams: list[Any] = []

    async def agent(task: str, llm: agl.LLM) -> float:
        client = openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key, max_retries=0)
        messages: Any = [{"role": "user", "content": task}]
        stream = await client.chat.completions.create(model=llm.model, messages=messages, stream=True)
        await anext(aiter(stream))
        streams.append((client, stream))
        return 1.0

    async with Lab(agent, reward=lambda task, output, rollout: output) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        for client, stream in streams:
            await stream.close()
            await client.close()
        spans = await lab.spans(rollout)
    assert (rollout.status, rollout.attempt.spans_dropped) == ("succeeded", 0)
    assert any(semconv.is_llm_call(span) for span in spans)
    assert agl.TraceToTriplet().adapt_attempt(rollout.attempt, spans) is not None


@pytest.mark.parametrize("start", [threading.Thread, lambda target: threading.Timer(0.01, target)])
async def test_a_thread_that_an_agent_starts_carries_the_context_of_its_attempt(start: Any) -> None:
    def work() -> None:
        with agl.operation(name="in the thread"):
            agl.emit_reward(0.5)

    def synchronous(task: str) -> None:
        thread = start(target=work)
        thread.start()
        thread.join()

    async def asynchronous(task: str) -> None:
        await asyncio.to_thread(synchronous, task)

    for agent in (synchronous, asynchronous):
        rollout, spans = await run(agent)
        assert rollout.attempt.reward == 0.5
        by_name = {span.name: span for span in spans}
        root, operation = by_name[semconv.SPAN_ROLLOUT], by_name[semconv.SPAN_OPERATION]
        assert (operation.trace_id, operation.parent_id) == (root.trace_id, root.span_id)


async def test_a_thread_of_a_pool_serves_every_attempt_and_carries_the_context_of_none() -> None:
    from concurrent.futures import ThreadPoolExecutor

    seen: list[Any] = []
    with ThreadPoolExecutor(1) as pool:

        def agent(task: str) -> None:
            pool.submit(agl.emit_reward, 0.5).result()

        rollout, _ = await run(agent)
        assert rollout.attempt.reward == 0.5
        pool.submit(lambda: seen.append(agl.tracer.tracer.get_active_tracer())).result()
    assert seen == [None]


async def test_the_seed_of_a_call_follows_the_turn_whatever_failed_or_timed_out_before() -> None:
    async def seeds(*, disturbed: bool) -> list[Any]:
        hang = asyncio.Event()
        script = [Answer(until=hang), Answer(), Answer(status=400), Answer()] if disturbed else [Answer(), Answer()]
        async with (
            ScriptedOpenAI(script) as server,
            gateway(model_list=[entry(server.endpoint, seed_calls=True)]) as case,
        ):
            rollout, client = await case.start(metadata={"seed": 7})
            second = [*HELLO, {"role": "assistant", "content": "Hello."}, *HELLO]
            if disturbed:
                with pytest.raises(openai.APITimeoutError):
                    await client.chat.completions.create(model="m", messages=HELLO, timeout=0.5)
                await case.eventual_span(rollout)  # the gateway has noticed it
            await client.chat.completions.create(model="m", messages=HELLO)
            if disturbed:
                with pytest.raises(openai.BadRequestError):
                    await client.chat.completions.create(model="m", messages=second)
            await client.chat.completions.create(model="m", messages=second)
            hang.set()
            return [request.body["seed"] for request in server.requests]

    first, second = await seeds(disturbed=False)
    assert first != second
    assert await seeds(disturbed=True) == [first, first, second, second]


def episode(number: int, reward: float | None, *, status: str = "succeeded", dropped: int = 0) -> Episode:
    attempt = agl.Attempt(
        rollout_id=f"ro-{number}", attempt_id="at", sequence_id=1, start_time=0.0, reward=reward, spans_dropped=dropped
    )
    rollout = agl.AttemptedRollout(
        rollout_id=f"ro-{number}", input={}, metadata={"group": "a"}, status=status, attempt=attempt, start_time=0.0
    )
    return Episode(rollout, reward, [call(f"c{number}")])


def call(response_id: str) -> agl.Triplet:
    answer = {"token_ids": [3, 4], "logprobs": [-1.0, -1.0]}
    return agl.Triplet(prompt={"token_ids": [1, 2]}, response=answer, metadata={"response_id": response_id})


@pytest.mark.parametrize("loss", ["no calls", "no tokens", "unreadable", "dropped"])
def test_a_rollout_counts_in_its_group_with_its_reward_whatever_became_of_its_spans(loss: str) -> None:
    first, *others = (episode(number, reward) for number, reward in enumerate([100.0, 1.0, 0.0]))
    if loss in ("no calls", "no tokens"):
        triplets = [] if loss == "no calls" else [agl.Triplet(prompt={}, response={}, metadata={})]
        first = Episode(first.rollout, 100.0, triplets)
    else:
        rollout = episode(0, 100.0, dropped=2 if loss == "dropped" else 0).rollout
        broken = agl.Span.from_attributes(name="chat", attributes={"gen_ai.operation.name": "chat", "logprobs": "x"})
        spans = [broken.model_copy(update={"rollout_id": f"ro-{number}", "attempt_id": "at"}) for number in (0, 1)]
        first = read_episode(rollout, spans, agl.TraceToTriplet())
        assert (first.reward, first.error) == (100.0, "SpansDropped" if loss == "dropped" else "AdapterError")
        if loss == "unreadable":
            with pytest.raises(agl.LightningError, match=r"all of the first 16 rollouts failed: 16 x AdapterError"):
                RewardCheck().add([first.outcome] * 16)
    experience = build_experience([first, *others], ExperienceSettings(estimator="dr_grpo"), max_length=50)
    assert [row.advantage for row in experience.rows] == pytest.approx([1 - 101 / 3, -101 / 3])


def test_all_reward_metrics_are_means_over_the_same_rollouts() -> None:
    won, failed = episode(0, 1.0), episode(1, None, status="failed")
    batch = [replace(won, rewards={"win": 1.0}), replace(failed, rewards={"win": 1.0})]
    described = describe_episodes(batch)
    assert (described["reward"], described["rewards/win"], described["success_rate"]) == (0.5, 0.5, 0.5)
    described = describe_episodes(batch, failed_reward=None)
    assert (described["reward"], described["rewards/win"]) == (1.0, 1.0)
    described = describe_episodes([replace(won, rewards={"cost": -2.0}), failed], failed_reward=0.0)
    assert described["rewards/cost"] == -2.0, "no failure is better than a success"


def test_a_call_of_the_gateway_counts_once_if_spans_of_another_process_name_neither_response_nor_parent() -> None:
    trace = Recorder()
    answer = [{"role": "assistant", "parts": [{"type": "text", "content": "sampled"}]}]
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": json.dumps(answer)}
    for number in range(2):  # with the same answer
        agent = trace.add("agent", {"agent.name": f"solver {number}"}, at=(1000 + 10 * number, 1009 + 10 * number))
        trace.add("chat", attributes, parent=agent, at=(1001 + 10 * number, 1003 + 10 * number))
        trace.gateway(f"r{number}", at=(500 + 10 * number, 502 + 10 * number))  # its clock is another machine's
    other = [{"role": "assistant", "parts": [{"type": "text", "content": "not through the gateway"}]}]
    trace.add("chat", {**attributes, "gen_ai.output.messages": json.dumps(other)}, at=(1021, 1022))
    first, second, third = trace.adapt()
    assert [each.metadata["agent_name"] for each in (first, second, third)] == ["solver 0", "solver 1", None]
    assert [each.metadata["response_id"] for each in (first, second, third)] == ["r0", "r1", None]
    assert [each.response["token_ids"] for each in (first, second, third)] == [[7, 8], [7, 8], []]


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": [None, -0.5]},
        {"logprobs": [math.nan, -0.5]},
        {"logprobs": [0.5, -0.5]},
        {"logprobs": [-1e30, -0.5]},
        {"logprobs": ["x", -0.5]},
        {"logprobs": [-0.5]},
        {"response_token_ids": [-1, 3]},
        {"response_token_ids": [1.5, 3]},
        {"response_token_ids": ["1", 3]},
        {"prompt_token_ids": [1, -2]},
        {"response_token_ids": [2**40, 3]},
    ],
    ids=str,
)
def test_odd_evidence_of_a_model_server_costs_the_rollout_and_not_the_run(change: dict[str, Any]) -> None:
    """Evidence is checked once, where it enters the adapter; what is beyond a vocabulary only the trainer knows."""
    evidence = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4], "logprobs": [-0.5, -0.5]}
    read = []
    for number in range(3):
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.response.id": f"c{number}",
            "agentlightning.gateway.complete": True,
            **evidence,
            **(change if number == 0 else {}),
        }
        ids = {"rollout_id": f"ro-{number}", "attempt_id": "at"}
        span = agl.Span.from_attributes(name="chat", attributes=attributes, **ids)
        read.append(read_episode(episode(number, float(number == 1)).rollout, [span], agl.TraceToTriplet()))
    experience = build_experience(read, ExperienceSettings(), max_length=50, vocabulary=100)
    assert [row.rollout for row in experience.rows] == ["ro-1", "ro-2"]
    spans = training_spans(experience, 1, episodes=read)
    ledger = {span.rollout_id: LedgerEntry.from_span(span) for span in spans if span.name == LEDGER_SPAN}
    assert ledger["ro-0"].outcome == "unreadable_spans"
