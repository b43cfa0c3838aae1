"""Usage limits of attempts."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from agentlightning.errors import ConfigError, StoreError
from agentlightning.types import AttemptedRollout, Span
from agentlightning_plugins.gateway.dialects.dialect import CallRefused
from agentlightning_plugins.gateway.limits import AttemptUsage, UsageLimits, UsageTracker, read_usage
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI, encode, render_prompt
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.plugins.gateway.gateway_setup import HELLO, Case, entry, gateway, waiting
from tests.waiting import until

ASKED: dict[str, Any] = {"model": "m", "messages": HELLO}
TOKENS_OF_A_CALL = len(encode(render_prompt({"messages": HELLO}))) + len(encode("ok")) + 1


async def test_calls_beyond_the_budget_are_refused_once_and_recorded() -> None:
    async with ScriptedOpenAI() as server, gateway(server, budget={"calls": 2}) as case:
        rollout, client = await case.start()
        eager = client.with_options(max_retries=3)
        for _ in range(2):
            await eager.chat.completions.create(**ASKED)
        with pytest.raises(openai.APIStatusError, match="has used 2 of its 2 calls") as caught:
            await eager.chat.completions.create(**ASKED)
        assert (caught.value.status_code, caught.value.code) == (402, "budget_exceeded")
        assert len(server.requests) == 2
        spans = await case.spans(rollout)
        assert len(spans) == 3, "the client did not retry"
        last = spans[-1].attributes
        assert last["agentlightning.gateway.budget_exceeded"] == "the attempt has used 2 of its 2 calls"
        assert last["agentlightning.gateway.complete"] is False
        _, other = await case.start()
        await other.chat.completions.create(**ASKED)  # every attempt has its own limits


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_counted_in_streams_too(stream: bool) -> None:
    budget = {"tokens": TOKENS_OF_A_CALL + 1}
    async with ScriptedOpenAI() as server, gateway(server, budget=budget) as case:
        _, client = await case.start()
        for _ in range(2):
            answer = await client.chat.completions.create(**ASKED, stream=stream)
            if stream:
                async for _ in answer:
                    pass
        with pytest.raises(openai.APIStatusError, match=f"has used {2 * TOKENS_OF_A_CALL} of its"):
            await client.chat.completions.create(**ASKED)


@pytest.mark.parametrize("max_tokens", [None, 5])
@pytest.mark.parametrize("name", ["tokens", "cost"])
async def test_calls_in_parallel_stay_within_the_budget(name: str, max_tokens: int | None) -> None:
    price = {"input_per_million": 1e6, "output_per_million": 1e6}
    asked = {**ASKED, **({} if max_tokens is None else {"max_tokens": max_tokens})}
    async with ScriptedOpenAI(lambda request: Answer("ok", delay_s=0.02)) as server:
        models = [entry(server.endpoint, price=price)]
        async with gateway(model_list=models, budget={name: 5 * TOKENS_OF_A_CALL}) as case:
            _, client = await case.start()
            calls = [client.chat.completions.create(**asked) for _ in range(60)]
            ended = await asyncio.gather(*calls, return_exceptions=True)
    refused = [error for error in ended if isinstance(error, openai.APIStatusError)]
    assert {error.status_code for error in refused} == {402}
    assert len(ended) - len(refused) == len(server.requests)
    assert 5 <= len(server.requests) <= (5 if max_tokens is None else 7), "a short estimate lets few more pass"


async def test_a_call_in_the_background_is_refused_because_nobody_would_count_it() -> None:
    async with ScriptedOpenAI() as server, gateway(server, provider="openai") as case:
        _, client = await case.start()
        with pytest.raises(openai.BadRequestError, match="background: true is not supported"):
            await client.responses.create(model="m", input="hi", background=True)
        assert not server.requests


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_streams_without_token_ids_are_charged_and_their_usage_is_hidden_from_the_agent(path: str) -> None:
    budget = {"tokens": TOKENS_OF_A_CALL}
    async with ScriptedOpenAI(token_ids="ignore") as server, gateway(server, budget=budget) as case:
        rollout, client = await case.start()
        create: Any = client.chat.completions.create if path == "chat" else client.completions.create
        asked = ASKED if path == "chat" else {"model": "m", "prompt": "x" * TOKENS_OF_A_CALL}
        chunks = [chunk async for chunk in await create(**asked, stream=True)]
        assert chunks
        assert all(chunk.choices for chunk in chunks)
        assert (await case.span(rollout)).attributes["gen_ai.usage.output_tokens"] == len(encode("ok")) + 1
        with pytest.raises(openai.APIStatusError, match="tokens"):
            await create(**asked, stream=True)
        _, client = await case.start()
        create = client.chat.completions.create
        usage = [c.usage async for c in await create(**ASKED, stream=True, stream_options={"include_usage": True})]
        assert usage[-1] is not None


async def counted(case: Case, rollout: AttemptedRollout, calls: int) -> bool:
    """Returns whether this many calls of a rollout have been recorded."""
    return len(await case.spans(rollout)) == calls


async def test_a_stream_that_the_agent_breaks_off_is_charged() -> None:
    script = [Answer("a long answer " * 40, chunk_delay_s=0.001)]
    async with ScriptedOpenAI(script, token_ids="ignore") as server, gateway(server, budget={"tokens": 100}) as case:
        rollout, client = await case.start()

        async def break_off() -> None:
            while len(server.requests) < 20:
                stream = await client.chat.completions.create(**ASKED, stream=True)
                for _ in range(30):
                    await anext(stream)
                await stream.close()
                await until(lambda: counted(case, rollout, len(server.requests)))

        with pytest.raises(openai.APIStatusError, match="of its 100 tokens"):
            await break_off()


async def test_calls_to_a_backend_that_reports_no_usage_are_charged_by_the_length_of_their_texts() -> None:
    body = (
        b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"' + b"word " * 100 + b'"},"finish_reason":"stop"}]}'
    )
    script = [Answer(body=body + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream")]
    async with ScriptedOpenAI(script) as server, gateway(server, budget={"tokens": 100}) as case:
        rollout, client = await case.start()
        async for _ in await client.chat.completions.create(**ASKED, stream=True):
            pass
        used = (await case.span(rollout)).attributes["agentlightning.gateway.tokens"]
        assert 125 <= used <= 150, "500 bytes of answer and about 60 of request, 4 bytes a token"
        with pytest.raises(openai.APIStatusError, match=f"has used {used} of its 100 tokens"):
            await client.chat.completions.create(**ASKED, stream=True)


@pytest.mark.parametrize("tokens", [-1e9, -5, 1e308, float("inf"), 2**62, "many", True, [1]])
async def test_a_forged_span_of_an_agent_neither_lowers_nor_corrupts_the_recorded_usage(tokens: Any) -> None:
    names = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "agentlightning.gateway.tokens")
    forged = dict.fromkeys((*names, "agentlightning.gateway.cost"), tokens)
    async with ScriptedOpenAI() as server, gateway(server, budget={"tokens": 2 * TOKENS_OF_A_CALL, "calls": 9}) as case:
        rollout, client = await case.start()
        await client.chat.completions.create(**ASKED)
        await case.proxy.stop()
        span = Span.from_attributes(
            attributes={"agentlightning.gateway.backend": "http://forged/v1", **forged},
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
        )
        await case.store.add_span(span)
        usage = await read_usage(case.store, (rollout.rollout_id, rollout.attempt.attempt_id))
        assert usage.tokens >= TOKENS_OF_A_CALL
        assert usage.cost >= 0
        await case.proxy.start()
        statuses = []
        for _ in range(3):
            try:
                await client.chat.completions.create(**ASKED)
            except openai.APIStatusError as error:
                statuses.append(error.status_code)
        assert statuses
        assert set(statuses) == {402}


async def test_costs_follow_the_price_of_the_model() -> None:
    price = {"input_per_million": 0.0, "output_per_million": 1e6}
    async with ScriptedOpenAI([Answer("five!")]) as server:
        models = [entry(server.endpoint, price=price)]
        async with gateway(model_list=models, budget={"cost": 6.0}) as case:
            _, client = await case.start()
            await client.chat.completions.create(**ASKED)
            with pytest.raises(openai.APIStatusError, match="has used 6 of its 6 cost"):
                await client.chat.completions.create(**ASKED)


async def test_a_restarted_gateway_restores_the_usage_of_an_attempt() -> None:
    price = {"input_per_million": 0.0, "output_per_million": 1e6}
    async with ScriptedOpenAI([Answer("five!")]) as server:
        models = [entry(server.endpoint, price=price)]
        async with gateway(model_list=models, budget={"cost": 6.0}) as case:
            rollout, client = await case.start()
            await client.chat.completions.create(**ASKED)
            await case.proxy.stop()
            attempt = rollout.rollout_id, rollout.attempt.attempt_id
            tokens = len(encode(render_prompt({"messages": HELLO}))) + len(encode("five!")) + 1
            assert await read_usage(case.store, attempt) == AttemptUsage(calls=1, tokens=tokens, cost=6.0)
            await case.proxy.start()
            with pytest.raises(openai.APIStatusError, match="has used 6 of its 6 cost"):
                await client.chat.completions.create(**ASKED)
            assert len(server.requests) == 1
            await case.proxy.flush()
            assert (await read_usage(case.store, attempt)).calls == 1, "a refused call costs nothing"


async def test_calls_whose_client_gives_up_during_a_pause_cost_nothing() -> None:
    async with ScriptedOpenAI() as server, gateway(server, budget={"calls": 2}) as case:
        _, client = await case.start()
        await case.proxy.pause()
        for _ in range(2):
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(max_retries=0, timeout=0.2).chat.completions.create(**ASKED)

        async def none_waits() -> bool:
            return not await waiting(case.proxy)

        await until(none_waits)
        await case.proxy.resume()
        for _ in range(2):
            await client.chat.completions.create(**ASKED)
        with pytest.raises(openai.APIStatusError, match="has used 2 of its 2 calls"):
            await client.chat.completions.create(**ASKED)


async def test_calls_are_still_served_if_the_store_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedOpenAI() as server, gateway(server, budget={"calls": 1}) as case:
        _, client = await case.start()

        async def fails(*arguments: object) -> None:
            raise StoreError("the disk is full")

        store: Any = case.store
        store.query_spans = fails
        await client.chat.completions.create(**ASKED)
        with pytest.raises(openai.APIStatusError, match="has used 1 of its 1 calls"):
            await client.chat.completions.create(**ASKED)
    assert "the disk is full" in caplog.text


async def test_the_refusal_of_a_call_beyond_the_budget_has_the_form_of_the_agents_dialect() -> None:
    from anthropic import APIStatusError

    async with ScriptedOpenAI() as server, gateway(server, budget={"calls": 1}) as case:
        rollout, openai_client = await case.start()
        client = (await case.anthropic_client(openai_client)).with_options(max_retries=3)
        asked: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 9}
        await client.messages.create(**asked)
        with pytest.raises(APIStatusError, match="has used 1 of its 1 calls") as caught:
            await client.messages.create(**asked)
        assert caught.value.status_code == 402
        body: Any = caught.value.body
        assert body["type"] == "error"
        assert len(await case.spans(rollout)) == 2


async def test_a_full_usage_tracker_removes_the_attempt_with_the_oldest_call() -> None:
    tracker = UsageTracker(UsageLimits(calls=2), max_attempts=2)

    async def call(attempt: str) -> None:
        async with tracker.reserve(("r", attempt), 0, 0.0):
            pass

    for attempt in ("a", "b", "a", "c"):
        await call(attempt)
    with pytest.raises(CallRefused, match="has used 2 of its 2 calls"):
        await call("a")
    tracker.add(("r", "b"), 5, 0.5)
    await tracker.restore(InMemoryLightningStore(), ("r", "b"))  # its usage is read from its spans, and it has none
    for _ in range(2):
        await call("b")


@pytest.mark.parametrize(
    ("budget", "says"),
    [({"token": 1}, "Did you mean 'tokens'"), ({"calls": 0}, "above 0"), ({"cost": "much"}, "valid number")],
)
def test_an_invalid_budget_is_refused_with_a_fix(budget: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLMProxy(budget=budget)
