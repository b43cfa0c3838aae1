"""The clients that integrations give to frameworks for one rollout."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning_integrations.framework.openai_client import sync_client
from agentlightning_plugins.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI

pytestmark = pytest.mark.environment("main", "newest", "oldest")


@pytest.mark.parametrize("stream", [False, True])
async def test_stopping_the_client_ends_calls_in_threads_even_if_file_descriptors_are_reused(
    stream: bool,
) -> None:
    called, release = asyncio.Event(), asyncio.Event()

    def hold(request: RecordedRequest) -> Answer:
        called.set()
        return Answer("abcdefgh", chunk_delay_s=60) if stream else Answer(until=release)

    async with ScriptedOpenAI(hold) as server:

        def ask(client: openai.OpenAI) -> Any:
            answer: Any = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=stream
            )
            return list(answer)

        with sync_client(agl.LLM(endpoint=server.endpoint, model="m")) as client:
            waiting = asyncio.create_task(asyncio.to_thread(ask, client))
            await asyncio.wait_for(called.wait(), 30)
            await asyncio.sleep(0.05)
        others = [socket.socketpair() for _ in range(8)]  # take the numbers of files that were closed
        with pytest.raises(Exception, match=r"over|onnection|closed|peer") as ended:
            await asyncio.wait_for(waiting, 30)
        assert not isinstance(ended.value, TimeoutError)
        with pytest.raises(Exception, match="over|onnection"):
            await asyncio.to_thread(ask, client)
        for pair in others:
            for end in pair:
                end.close()
        release.set()
    assert len(server.requests) == 1
