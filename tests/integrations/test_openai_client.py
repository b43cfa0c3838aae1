"""The clients that integrations give to frameworks for one rollout."""

from __future__ import annotations

import asyncio
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning_integrations.shared.openai_client import _StoppableClient, sync_client
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.environment("main", "newest", "oldest")


@pytest.mark.parametrize("stream", [False, True])
async def test_stopping_the_client_ends_calls_in_threads_even_if_file_descriptors_are_reused(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)  # retries must not be sent either
    called, release = asyncio.Event(), asyncio.Event()

    def hold(request: RecordedRequest) -> Answer:
        called.set()
        return Answer("abcdefgh", chunk_delay_s=3600) if stream else Answer(until=release)

    async with ScriptedOpenAI(hold) as server:

        def ask(client: openai.OpenAI) -> Any:
            answer: Any = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=stream
            )
            return list(answer)

        with sync_client(agl.LLM(endpoint=server.endpoint, model="m")) as client:
            waiting = asyncio.create_task(asyncio.to_thread(ask, client))
            await called.wait()
            await asyncio.sleep(0.05)
        others = [socket.socketpair() for _ in range(8)]  # reuse the file descriptors that were closed
        with pytest.raises(Exception, match=r"over|onnection|closed|peer") as ended:
            await asyncio.wait_for(waiting, LIMIT_S)
        assert not isinstance(ended.value, TimeoutError)
        with pytest.raises(Exception, match="over|onnection"):
            await asyncio.to_thread(ask, client)
        for pair in others:
            for end in pair:
                end.close()
        release.set()
    assert len(server.requests) == 1


async def test_a_call_that_is_connecting_when_the_client_is_stopped_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, stopped = threading.Event(), threading.Event()
    look_up = socket.getaddrinfo

    def look_up_slowly(*arguments: Any, **more: Any) -> Any:
        looking.set()
        stopped.wait(LIMIT_S)
        return look_up(*arguments, **more)

    async with ScriptedOpenAI([Answer("late")]) as server:
        with sync_client(agl.LLM(endpoint=server.endpoint, model="m")) as client:
            monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
            calling = client.with_options(max_retries=0).chat.completions.create
            call = asyncio.create_task(
                asyncio.to_thread(calling, model="m", messages=[{"role": "user", "content": ""}])
            )
            assert await asyncio.to_thread(looking.wait, LIMIT_S)
        stopped.set()
        with pytest.raises(openai.APIConnectionError):
            await asyncio.wait_for(call, LIMIT_S)
        assert server.requests == []


def test_sockets_and_streams_are_used_only_while_holding_the_lock() -> None:
    class Set(weakref.WeakSet[Any]):
        def __iter__(self) -> Iterator[Any]:
            assert transport._lock.locked()
            return super().__iter__()

        def add(self, item: Any) -> None:
            assert transport._lock.locked()
            super().add(item)

    class Connection:
        """A stream of the transport that is also its socket."""

        is_shut_down = False

        def get_extra_info(self, name: str) -> Any:
            return self

        def shutdown(self, how: int) -> None:
            self.is_shut_down = True

    transport = _StoppableClient()
    transport._sockets, transport._streams = Set(), Set()
    early, late = Connection(), Connection()
    transport._on_transport_event("connection.connect_tcp.complete", {"return_value": early})
    assert not early.is_shut_down
    transport.stop()
    transport._on_transport_event("connection.connect_tcp.complete", {"return_value": late})
    assert early.is_shut_down
    assert late.is_shut_down
