"""Pausing the gateway around a change of weights."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, RateLimitError

from agentlightning.errors import ConflictError
from agentlightning_plugins.gateway.dialects.dialect import CallRefused
from agentlightning_plugins.gateway.limits import Admission
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.plugins.gateway.gateway_setup import HELLO, Case, entry, gateway, waiting
from tests.waiting import LIMIT_S, until


async def change_weights(case: Case, server: ScriptedOpenAI) -> None:
    """Pauses with one call in flight and one new call, drains, and resumes with version 7."""
    proxy = case.proxy
    await proxy.resume(weight_version=6)
    old_rollout, old_client = await case.start()
    old = asyncio.create_task(old_client.chat.completions.create(model="m", messages=HELLO))
    await until(lambda: bool(server.requests))
    await proxy.pause()
    assert not await proxy.drain(timeout=0.01)
    new_rollout, new_client = await case.start()
    new = asyncio.create_task(new_client.chat.completions.create(model="m", messages=HELLO))
    await until(lambda: waiting(proxy))
    assert await proxy.drain(timeout=LIMIT_S)
    assert (await old).choices[0].message.content == "old"
    assert len(server.requests) == 1
    assert not new.done()
    status = await proxy.status()
    assert (status["paused"], status["in_flight"], status["waiting"]) == (True, 0, 1)
    await proxy.resume(weight_version=7)
    assert (await new).choices[0].message.content == "new"
    for rollout, version in ((old_rollout, 6), (new_rollout, 7)):
        assert (await case.span(rollout)).attributes["agentlightning.weight_version"] == version


async def test_calls_in_flight_finish_and_new_calls_wait_for_the_new_weights() -> None:
    async with ScriptedOpenAI([Answer("old", delay_s=0.5), Answer("new")]) as server, gateway(server) as case:
        await change_weights(case, server)


async def test_a_gateway_in_a_separate_process_can_be_paused_too() -> None:
    store = InMemoryLightningStore()
    served = LightningStoreServer(store, port=0, token="a-secret")
    await served.start()
    reached = LightningStoreClient(served.endpoint, "a-secret")
    async with ScriptedOpenAI([Answer("old", delay_s=0.5), Answer("new")]) as server:
        models = [entry(server.endpoint)]
        proxy = LLMProxy(model_list=models, store=reached, launch_mode="process", require_keys=False)
        await proxy.start()
        try:
            async with AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="any", max_retries=0) as client:
                await change_weights(Case(proxy, store, client, contextlib.AsyncExitStack()), server)
        finally:
            await proxy.stop()
            await reached.close()
            await served.stop()
            await store.close()


async def test_draining_waits_for_the_end_of_streams_which_keep_their_first_weight_version() -> None:
    async with ScriptedOpenAI([Answer("a long answer", chunk_delay_s=0.2)]) as server, gateway(server) as case:
        await case.proxy.resume(weight_version=1)
        rollout, client = await case.start()
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        await case.proxy.pause()
        drained = asyncio.create_task(case.proxy.drain(timeout=LIMIT_S))
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert await drained
        await case.proxy.resume(weight_version=2)
        assert text == "a long answer"
        assert (await case.span(rollout)).attributes["agentlightning.weight_version"] == 1


async def test_a_gateway_is_paused_drained_and_resumed_over_http_with_the_token() -> None:
    async with ScriptedOpenAI([Answer("old", delay_s=0.5), Answer("new")]) as server, gateway(server) as case:
        root = case.proxy.endpoint.removesuffix("/v1")
        store: Any = case.store
        store.token = "the-stores-token"
        headers = {"Authorization": "Bearer the-stores-token"}
        async with aiohttp.ClientSession() as session:

            async def post(path: str, wanted: Any, headers: dict[str, str] = headers) -> tuple[int, Any]:
                async with session.post(f"{root}/{path}", json=wanted, headers=headers) as response:
                    return response.status, await response.json()

            _, old_client = await case.start()
            old = asyncio.create_task(old_client.chat.completions.create(model="m", messages=HELLO))
            await until(lambda: bool(server.requests))
            assert (await post("pause", {}, {}))[0] == 401, "an agent must not pause other agents"
            assert (await post("pause", {}))[1]["paused"] is True
            assert await post("drain", {"timeout_s": 0}) == (200, {"drained": False})
            rollout, client = await case.start()
            new = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
            await until(lambda: waiting(case.proxy))
            assert await post("drain", {"timeout_s": 30}) == (200, {"drained": True})
            assert not new.done()
            assert (await old).choices[0].message.content == "old"
            drains: list[Any] = [("drain", {"timeout_s": wrong}) for wrong in ("5", True, -1)]
            for path, body in [*drains, ("resume", {"weight_version": "9"}), ("resume", [9])]:
                assert (await post(path, body))[0] == 400
            async with session.get(f"{root}/resume", headers=headers) as response:
                assert response.status == 405
            async with session.post(f"{root}/resume", data=b"{}", headers=headers) as response:
                assert response.status == 415, "web pages can post this content type"
            assert (await case.proxy.status())["paused"]
            status = (await post("resume", {"weight_version": 9}))[1]
            assert (status["paused"], status["weight_version"]) == (False, 9)
            await new
        assert (await case.span(rollout)).attributes["agentlightning.weight_version"] == 9


async def test_the_weight_version_of_the_backend_takes_precedence() -> None:
    async with ScriptedOpenAI([Answer(extra={"weight_version": 41})]) as server, gateway(server) as case:
        await case.proxy.resume(weight_version=7)
        rollout, client = await case.start()
        await client.chat.completions.create(model="m", messages=HELLO)
        assert (await case.span(rollout)).attributes["agentlightning.weight_version"] == 41


async def test_a_call_that_is_cancelled_while_it_waits_reaches_no_backend() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        await case.proxy.pause()
        rollout, client = await case.start()
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
        await until(lambda: waiting(case.proxy))
        call.cancel()

        async def no_call_waits() -> bool:
            return not await waiting(case.proxy)

        await until(no_call_waits)
        await case.proxy.resume()
        assert not server.requests
        assert (await case.span(rollout)).attributes["agentlightning.gateway.complete"] is False


async def test_a_call_that_is_refused_during_a_pause_uses_up_neither_the_budget_nor_a_seed() -> None:
    async with ScriptedOpenAI() as server:
        models = [entry(server.endpoint, seed_calls=True)]
        async with gateway(model_list=models, budget={"calls": 2}, pause_wait_s=0) as case:
            sent = []
            for refused in (0, 3):
                rollout = await case.store.start_rollout({"task": 1}, metadata={"seed": 5})
                client = case.client(case.proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id).endpoint)
                await case.proxy.pause()
                for _ in range(refused):
                    with pytest.raises(RateLimitError):
                        await client.chat.completions.create(model="m", messages=HELLO)
                await case.proxy.resume()
                for _ in range(2):
                    await client.chat.completions.create(model="m", messages=HELLO)
                sent.append([request.body["seed"] for request in server.requests[-2:]])
    assert sent[0] == sent[1]


async def test_a_call_is_refused_if_too_many_calls_wait_or_it_waits_too_long() -> None:
    admission = Admission(max_waiting=1, pause_wait_s=0.05)
    admission.pause()
    patient = asyncio.create_task(admission.enter())
    await asyncio.sleep(0)
    with pytest.raises(CallRefused, match="paused"):  # too many calls wait
        await admission.enter()
    with pytest.raises(CallRefused, match="paused"):  # the call has waited too long
        await patient
    assert (admission.waiting, admission.in_flight) == (0, 0)
    admission.resume(None)
    await admission.enter()
    assert not await admission.drain(0.01)
    admission.leave()
    assert await admission.drain(0.01)


async def test_calls_during_a_pause_get_429_with_retry_after_if_waiting_is_disabled() -> None:
    async with ScriptedOpenAI() as server, gateway(server, pause_wait_s=0) as case:
        await case.proxy.pause()
        _, client = await case.start()
        with pytest.raises(Exception, match="paused") as caught:
            await client.chat.completions.create(model="m", messages=HELLO)
        response: Any = caught.value.response
        assert (response.status_code, response.headers["Retry-After"]) == (429, "5")


async def test_calls_that_wait_when_the_gateway_stops_reach_no_model() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        await case.proxy.pause()
        _, client = await case.start()
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
        await until(lambda: waiting(case.proxy))
        await case.proxy.stop()
        with pytest.raises(RateLimitError, match="paused"):
            await call
        assert not server.requests


async def test_a_gateway_that_is_not_running_cannot_be_paused() -> None:
    with pytest.raises(ConflictError, match="start it first"):
        await LLMProxy(store=InMemoryLightningStore()).pause()
