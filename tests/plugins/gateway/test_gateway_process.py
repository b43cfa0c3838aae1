"""The gateway in a separate process that reaches its store over HTTP, and a gateway whose process is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.errors import ConfigError, StoreError
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.plugins.gateway.gateway_setup import HELLO, entry


async def test_a_gateway_process_records_into_a_served_store_and_its_death_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = InMemoryLightningStore()
    served = LightningStoreServer(store, port=0, token="a-secret")
    await served.start()
    reached = LightningStoreClient(served.endpoint, "a-secret")
    async with ScriptedOpenAI([Answer("one"), Answer("two")]) as server:
        proxy = LLMProxy(model_list=[entry("http://127.0.0.1:1/v1")], store=reached, launch_mode="process")
        await proxy.start()
        try:
            proxy.update_model_list([entry(server.endpoint)])
            rollout = await store.start_rollout({"task": 1})
            llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
            async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
                await client.chat.completions.create(model="m", messages=HELLO)
                await proxy.flush()
                (span,) = await store.query_spans(rollout.rollout_id)
                assert span.attributes["response_token_ids"]
                await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
                with pytest.raises(openai.APIStatusError, match="is over"):
                    await call_on(client)
            monkeypatch.setenv("KEY_OF_THE_PARENT_ONLY", "any")
            with pytest.raises(ConfigError, match="KEY_OF_THE_PARENT_ONLY, which is not set"):
                proxy.update_model_list([{**entry(server.endpoint), "api_key": "os.environ/KEY_OF_THE_PARENT_ONLY"}])
            assert (await proxy.status())["backends"][0]["endpoint"] == server.endpoint, "its models are unchanged"
            os.kill(_pid(proxy), signal.SIGKILL)
            with pytest.raises(StoreError, match="exited with code -9"):
                await proxy.flush()
            assert not proxy.is_running
            await proxy.stop()
            await proxy.start()  # it can be started again
            assert proxy.is_running
        finally:
            await proxy.stop()
            await reached.close()
            await served.stop()
            await store.close()


KILLED = """
import asyncio, os, signal, sys, urllib.request
import agentlightning as agl

async def main(url, endpoint, body):
    store = agl.create_store(url)
    proxy = agl.LLMProxy(store=store, model_list=[{"model": "m", "endpoint": endpoint, "api_key": "any"}])
    await proxy.start()
    rollout = await store.start_rollout({"task": 1})
    llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
    headers = {"content-type": "application/json", "authorization": f"Bearer {llm.api_key}"}
    request = urllib.request.Request(llm.endpoint + "/chat/completions", body.encode(), headers)

    def call():
        with urllib.request.urlopen(request) as answer:
            assert b"one" in answer.read()
        os.kill(os.getpid(), signal.SIGKILL)

    await asyncio.to_thread(call)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answered_call_is_already_in_a_durable_store_when_the_process_is_killed(
    tmp_path: Path, stream: bool
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    body = {"model": "m", "messages": HELLO, "stream": stream}
    async with ScriptedOpenAI([Answer("one")]) as server:
        command = [sys.executable, "-c", KILLED, url, server.endpoint, json.dumps(body)]
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE, env=environment)
        _, errors = await process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()
    store = agl.create_store(url)
    try:
        (rollout,) = (await store.query_rollouts()).items
        (span,) = await store.query_spans(rollout.rollout_id)
        assert span.attributes["agentlightning.gateway.complete"]
        assert span.attributes["response_token_ids"]
    finally:
        await store.close()


async def test_a_gateway_process_refuses_a_store_in_memory() -> None:
    with pytest.raises(ConfigError, match=r"InMemoryLightningStore lives in this one: .*launch_mode='thread'"):
        await LLMProxy(store=InMemoryLightningStore(), launch_mode="process").start()


async def call_on(client: AsyncOpenAI) -> None:
    for _ in range(1000):
        await client.chat.completions.create(model="m", messages=HELLO)


def _pid(proxy: LLMProxy) -> int:
    launched: Any = proxy._launched
    pid: int = launched._process.pid
    return pid
