"""Usage limits of attempts."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from agentlightning.errors import ConfigError, StoreError
from agentlightning_plugins.gateway.limits.usage import Usage, UsageLimits, UsageTracker, read_usage
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.scripted_model.server import Answer, ScriptedOpenAI, encode, render_prompt
from tests.plugins.gateway.gateway_setup import HELLO, entry, gateway

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
        await other.chat.completions.create(**ASKED)  # every attempt has limits of its own


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
            assert await read_usage(case.store, attempt) == Usage(calls=1, tokens=tokens, cost=6.0)
            await case.proxy.start()
            with pytest.raises(openai.APIStatusError, match="has used 6 of its 6 cost"):
                await client.chat.completions.create(**ASKED)
            assert len(server.requests) == 1
            await case.proxy.flush()
            assert (await read_usage(case.store, attempt)).calls == 1, "a refused call costs nothing"


async def test_calls_go_on_if_the_store_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_the_agent_gets_the_refusal_in_its_own_dialect() -> None:
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


def test_the_tracker_forgets_the_attempt_with_the_oldest_call() -> None:
    tracker = UsageTracker(UsageLimits(calls=2), max_attempts=2)
    for attempt in ("a", "b", "a", "c"):
        assert tracker.begin(("r", attempt)) is None
    assert tracker.begin(("r", "a")) is not None
    tracker.add(("r", "b"), 5, 0.5)
    assert tracker.needs(("r", "b")), "its usage is read from its spans again"


@pytest.mark.parametrize(
    ("budget", "says"),
    [({"token": 1}, "Did you mean 'tokens'"), ({"calls": 0}, "above 0"), ({"cost": "much"}, "above 0")],
)
def test_an_invalid_budget_is_refused_with_a_fix(budget: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLMProxy(budget=budget)
