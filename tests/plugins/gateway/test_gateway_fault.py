"""Model servers and agents that misbehave: errors, recorded spans, and leaks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from agentlightning_plugins.gateway.backends.provider import OpenAICompatible
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.plugins.gateway.gateway_setup import HELLO, PROVIDER_KEY, Case, entry, gateway
from tests.process import count_open_files
from tests.waiting import LIMIT_S, until

Misbehaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ASKED: dict[str, Any] = {"model": "m", "messages": HELLO}
CHUNK = {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "word "}}]}
EVENT = b"data: " + json.dumps(CHUNK).encode() + b"\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@dataclass
class RawServer:
    """A model server that sends given bytes."""

    endpoint: str
    connections: int = 0
    """Number of open connections."""
    requests: int = 0


@contextlib.asynccontextmanager
async def raw_server(misbehave: Misbehaviour, resets_after: asyncio.Event | None = None) -> AsyncIterator[RawServer]:
    """Starts a server that may reset each connection once an event has occurred, such as that its bytes were read."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"get"):  # a health check
                    writer.write(JSON_HEAD + b"Content-Length: 2\r\n\r\n{}")
                    continue
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                server.requests += 1
                await misbehave(reader, writer)
                if resets_after is not None:
                    await resets_after.wait()
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            server.connections -= 1
            writer.transport.abort()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    server = RawServer(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1")
    try:
        yield server
    finally:
        listening.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def body(data: bytes) -> bytes:
    return JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data


def sends(*pieces: bytes, pause_s: float = 0.0, then_resets: bool = False) -> Misbehaviour:
    async def misbehave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if then_resets:  # even if this overtakes the bytes, the outcome is the same
            writer.transport.abort()

    return misbehave


async def stalls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the other side closes


async def stalls_in_a_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(EVENT))
    await reader.read()


async def ask(client: openai.AsyncOpenAI, stream: bool, has_begun: asyncio.Event | None = None) -> str:
    """Returns the text of an answer; sets an event at the first chunk of a stream."""
    if not stream:
        return (await client.chat.completions.create(**ASKED)).choices[0].message.content or ""
    text = ""
    async for chunk in await client.chat.completions.create(**ASKED, stream=True):
        text += chunk.choices[0].delta.content or ""
        if has_begun is not None:
            has_begun.set()
    return text


NOT_STREAMED: dict[str, tuple[Misbehaviour, int, str]] = {
    "resets before it answers": (sends(then_resets=True), 502, "cannot be reached"),
    "resets in its headers": (sends(b"HTTP/1.1 200 OK\r\nContent-Ty", then_resets=True), 502, "cannot be reached"),
    "resets in its body": (sends(body(b"{}" * 100)[:-50], then_resets=True), 502, "cannot be reached"),
    "sends nothing": (stalls, 504, "did not answer in time"),
    "does not speak HTTP": (sends(b"SSH-2.0-OpenSSH_9.6\r\n", then_resets=True), 502, "cannot be reached"),
    "sends half its JSON": (sends(body(b'{"id": "x", "choices": [{"ind')), 502, "is invalid for"),
    "sends JSON of another kind": (sends(body(b"[1, 2]")), 502, "is invalid for"),
    "sends bytes that are not JSON": (sends(body(b"\xff\xfe\x00")), 502, "is invalid for"),
    "sends null": (sends(body(b"null")), 502, "is invalid for"),
    "sends events as JSON": (sends(body(EVENT + b"data: [DONE]\n\n")), 502, "is invalid for"),
    "sends invalid token ids": (
        sends(body(b'{"id": "x", "choices": [], "prompt_token_ids": 5}')),
        502,
        "is invalid for",
    ),
    "quotes its key where an excerpt ends": (sends(body(b"x" * 190 + PROVIDER_KEY.encode())), 502, "is invalid for"),
    "folds the line of a header": (
        sends(b"HTTP/1.1 200 OK\r\nX-Note: a\r\n b\r\nContent-Length: 2\r\n\r\n{}"),
        502,
        "malformed header|is invalid for",
    ),
    "folds its content type": (
        sends(b"HTTP/1.1 200 OK\r\nContent-Type: text/\r\n event-stream\r\nContent-Length: 2\r\n\r\n{}"),
        502,
        "malformed header|is invalid for",
    ),
    "has a status below 100": (
        sends(
            b"HTTP/1.1 099 Odd\r\nContent-Length: 31\r\n\r\n" + b'{"error": {"message": "odd it"}}'[:31],
            then_resets=False,
        ),
        502,
        "answered 99|cannot be reached",
    ),
    "has a status above 599": (
        sends(b"HTTP/1.1 999 Odd\r\nContent-Length: 32\r\n\r\n" + b'{"error": {"message": "odd it"}}'),
        502,
        "answered 999: .*odd it",
    ),
    "redirects": (
        sends(b"HTTP/1.1 307 Over there\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"),
        502,
        "answered 307",
    ),
    "sends an HTML page": (
        sends(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"),
        502,
        "is invalid for",
    ),
}

STREAMED: dict[str, tuple[Misbehaviour, str]] = {
    "resets in a stream": (sends(STREAM_HEAD + chunk(EVENT)), "broke off"),
    "resets in an event": (sends(STREAM_HEAD + chunk(EVENT), chunk(EVENT[:30])), "broke off"),
    "resets in a chunk": (sends(STREAM_HEAD + chunk(EVENT), b"ff\r\ndata: {"), "broke off"),
    "falls silent in a stream": (stalls_in_a_stream, "stalled"),
    "streams half a JSON": (sends(STREAM_HEAD + chunk(b'data: {"id": \n\n'), chunk(b"")), "streamed an invalid chunk"),
    "ends a stream early": (sends(STREAM_HEAD + chunk(EVENT) + chunk(b"")), "ended its answer early"),
    "streams an error": (
        sends(STREAM_HEAD + chunk(EVENT + b'data: {"error": {"message": "out of memory"}}\n\n') + chunk(b"")),
        "out of memory",
    ),
    "quotes its key in an error at the end of a stream": (
        sends(
            STREAM_HEAD
            + chunk(EVENT + b'data: {"error": {"message": "bad key %b"}}' % PROVIDER_KEY.encode())
            + chunk(b"")
        ),
        "bad key",
    ),
}
"""Servers that reset do so when the agent has the first chunk: otherwise the reset might overtake the bytes."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NOT_STREAMED)
async def test_a_call_to_a_misbehaving_server_fails_and_is_recorded_as_incomplete(name: str, stream: bool) -> None:
    misbehave, status, says = NOT_STREAMED[name]
    patience_s = 0.3 if misbehave is stalls else LIMIT_S
    async with raw_server(misbehave) as server:
        async with gateway(model_list=[entry(server.endpoint)], num_retries=0, read_timeout_s=patience_s) as case:
            rollout, client = await case.start()
            with pytest.raises(openai.APIStatusError, match=says) as caught:
                await ask(client, stream)
            assert caught.value.status_code == status
            error: Any = caught.value.response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert PROVIDER_KEY[:6] not in error["message"]
            await assert_incomplete(case, rollout)
        await until(lambda: server.connections == 0)


@pytest.mark.parametrize("name", STREAMED)
async def test_a_call_with_a_broken_stream_fails_and_is_recorded_as_incomplete(name: str) -> None:
    misbehave, says = STREAMED[name]
    patience_s = 0.3 if misbehave is stalls_in_a_stream else LIMIT_S
    has_begun = asyncio.Event()
    async with raw_server(misbehave, has_begun if name.startswith("resets") else None) as server:
        async with gateway(model_list=[entry(server.endpoint)], num_retries=0, read_timeout_s=patience_s) as case:
            rollout, client = await case.start()
            with pytest.raises(openai.APIError, match=says) as caught:
                await ask(client, True, has_begun)
            assert PROVIDER_KEY[:6] not in str(caught.value)
            await assert_incomplete(case, rollout)
        await until(lambda: server.connections == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_arrives_byte_by_byte_does_not_time_out(stream: bool) -> None:
    end = {"choices": [{"index": 0, "delta": {"content": "!"}, "finish_reason": "stop"}]}
    whole = body(
        json.dumps({"id": "x", "choices": [{"message": {"content": "word !"}, "finish_reason": "stop"}]}).encode()
    )
    events = (
        STREAM_HEAD + chunk(EVENT) + chunk(b": a comment\n\n") * 10 + chunk(b"data: %b\n\n" % json.dumps(end).encode())
    )
    data = events + chunk(b"data: [DONE]\n\n") + chunk(b"") if stream else whole
    pieces = [data[: len(data) - 12], *(data[i : i + 1] for i in range(len(data) - 12, len(data)))]
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(raw_server(sends(*pieces, pause_s=0.1)))
        settings: dict[str, Any] = {"num_retries": 0, "read_timeout_s": 1.0}
        case = await stack.enter_async_context(gateway(model_list=[entry(server.endpoint)], **settings))
        rollout, client = await case.start()
        assert await ask(client, stream) == "word !"
        assert (await case.span(rollout)).attributes["agentlightning.gateway.complete"] is True


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_too_large_is_cut_off(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("backends.upstream", "relay"):
        monkeypatch.setattr(f"agentlightning_plugins.gateway.{module}.MAX_ANSWER_BYTES", 10_000)

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD if stream else JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(10_000):
            writer.write(chunk(b"x" * 1000))
            await writer.drain()

    async with raw_server(floods) as server:
        async with gateway(model_list=[entry(server.endpoint)], num_retries=0) as case:
            rollout, client = await case.start()
            with pytest.raises(openai.APIError, match="larger than 10000 bytes"):
                await ask(client, stream)
            await assert_incomplete(case, rollout)
        await until(lambda: server.connections == 0)


async def assert_incomplete(case: Case, rollout: Any) -> None:
    span = await case.eventual_span(rollout)  # an agent may leave at the first error in a stream, before its end
    assert span.attributes["agentlightning.gateway.complete"] is False
    assert span.status.status_code == "ERROR"
    assert PROVIDER_KEY[:6] not in span.model_dump_json()

    async def is_idle() -> bool:
        return (await case.proxy.status())["in_flight"] == 0

    await until(is_idle)
    assert len(await case.spans(rollout)) == 1


async def test_an_agent_that_uses_the_messages_api_gets_errors_in_its_form() -> None:
    import anthropic

    async with (
        raw_server(sends(then_resets=True)) as server,
        gateway(model_list=[entry(server.endpoint)], num_retries=0) as case,
    ):
        _, openai_client = await case.start()
        client = await case.anthropic_client(openai_client)
        with pytest.raises(anthropic.APIStatusError, match="cannot be reached") as caught:
            await client.messages.create(model="m", messages=HELLO, max_tokens=9)
        error: Any = caught.value.body
        assert (error["type"], error["error"]["type"]) == ("error", "api_error")


async def test_an_unexpected_error_of_a_provider_is_reported_and_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: object, *arguments: object) -> None:
        raise LookupError("a third-party bug")

    monkeypatch.setattr(OpenAICompatible, "send", fails)
    async with gateway(model_list=[entry("http://127.0.0.1:9/v1")]) as case:
        rollout, client = await case.start()
        with pytest.raises(openai.InternalServerError, match="the gateway failed: LookupError"):
            await ask(client, False)
        await assert_incomplete(case, rollout)
    assert "a third-party bug" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_very_long_lines_are_relayed_whole(stream: bool) -> None:
    text = "long " * 1_000_000
    delta = {"content": text} if stream else None
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    choice |= {"delta": delta} if stream else {"message": {"role": "assistant", "content": text}}
    answer = json.dumps({"id": "x", "object": "chat.completion", "choices": [choice]}).encode()
    event = b"data: " + answer + b"\n\ndata: [DONE]\n\n"
    sent = STREAM_HEAD + chunk(event) + chunk(b"") if stream else body(answer)
    async with raw_server(sends(sent)) as server:
        models = [entry(server.endpoint)]
        async with gateway(model_list=models, num_retries=0) as case:
            rollout, client = await case.start()
            assert await ask(client, stream) == text
            assert (await case.span(rollout)).attributes["agentlightning.gateway.complete"] is True


async def test_repeated_429_answers_are_handled_by_waiting_and_by_failover() -> None:
    stormy = [Answer(status=429, headers={"Retry-After": "0.05"})] * 2 + [Answer("calm")]
    async with ScriptedOpenAI(stormy) as server, gateway(server, num_retries=3) as case:
        _, client = await case.start()
        assert await ask(client, False) == "calm"
        assert len(server.requests) == 3
    always = [Answer(status=429, headers={"Retry-After": "3600"})]
    async with ScriptedOpenAI(always) as storm, ScriptedOpenAI([Answer("calm")]) as calm, gateway(storm, calm) as case:
        for _ in range(5):
            _, client = await case.start()
            assert await ask(client, False) == "calm"
        assert len(storm.requests) <= 1, "a backend is not tried before its Retry-After"


async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    while True:
        writer.write(chunk(EVENT * 200))
        await writer.drain()


async def ends_with_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    choice = {"index": 0, "delta": {"content": "x" * 8_000_000}, "finish_reason": "stop"}
    last = json.dumps({**CHUNK, "choices": [choice]}).encode()
    writer.write(STREAM_HEAD + chunk(b"data: " + last + b"\n\ndata: [DONE]\n\n") + chunk(b""))
    await writer.drain()


@pytest.mark.parametrize("misbehave", [floods, ends_with_much])
async def test_an_agent_that_stops_reading_does_not_delay_a_change_of_weights(misbehave: Misbehaviour) -> None:
    async with raw_server(misbehave) as server:
        models = [entry(server.endpoint)]
        async with gateway(model_list=models, read_timeout_s=0.5) as case:
            rollout, client = await case.start()
            _, writer = await begin_stream(str(client.base_url))
            await until(lambda: server.requests == 1)
            await case.proxy.pause()
            assert await case.proxy.drain(timeout=LIMIT_S)
            writer.transport.abort()
            assert len(await case.spans(rollout)) == 1


async def test_a_stream_that_the_agent_does_not_read_ends_with_its_attempt() -> None:
    async with raw_server(floods) as server, gateway(model_list=[entry(server.endpoint)]) as case:
        rollout, client = await case.start()
        reader, writer = await begin_stream(str(client.base_url))
        await until(lambda: server.requests == 1)
        await asyncio.sleep(0.5)  # until the buffers towards the agent are full
        await case.store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
        assert await case.proxy.drain(timeout=LIMIT_S)
        text = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := await reader.read(1 << 20):
                text = text[-200:] + piece
                assert b"HTTP/1.1 410" not in text, "an error response was sent inside the stream"
        writer.transport.abort()
        span = await case.span(rollout)
        assert (span.attributes["error.type"], span.attributes["agentlightning.gateway.complete"]) == ("_OTHER", False)


async def test_no_call_is_made_if_the_attempt_ends_while_its_request_is_read() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, client = await case.start()
        url = urlsplit(str(client.base_url))
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        text = json.dumps(ASKED).encode()
        head = f"POST {url.path}chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(text)}\r\n"
        writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await case.store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")

        async def is_over() -> bool:
            with contextlib.suppress(openai.APIStatusError):
                await ask(client, False)
                return False
            return True

        await until(is_over)
        asked = len(server.requests)
        writer.write(text)
        assert (await reader.readline()).startswith(b"HTTP/1.1 410")
        assert len(server.requests) == asked
        writer.transport.abort()


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"model": "m", "input": "%b"}' % (b"x" * 5000), 413, "request_too_large"),
    ],
)
async def test_an_invalid_request_is_refused_in_the_agents_dialect(
    monkeypatch: pytest.MonkeyPatch, text: bytes, status: int, code: str
) -> None:
    if status == 413:
        monkeypatch.setattr("agentlightning_plugins.gateway.call.MAX_BODY_BYTES", 1000)
    async with ScriptedOpenAI() as server, gateway(server) as case, aiohttp.ClientSession() as session:
        _, client = await case.start()
        async with session.post(f"{client.base_url}responses", data=text) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (status, code)
    assert not server.requests


async def test_a_slow_agent_slows_down_only_the_backend_stream_that_it_reads() -> None:
    sent = 0

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        piece = chunk(EVENT * 200)
        for _ in range(4000):
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async with raw_server(floods) as server, ScriptedOpenAI() as other:
        models = [entry(server.endpoint), entry(other.endpoint, model="other")]
        async with gateway(model_list=models, num_retries=0) as case:
            rollout, client = await case.start()
            reader, writer = await begin_stream(str(client.base_url))
            await until(lambda: sent > 0)
            before = -1
            while before != sent:  # until backpressure has reached the backend
                before = sent
                await asyncio.sleep(0.3)
            assert sent < 4000 * len(EVENT) * 200 / 4, "the gateway must not buffer what the agent does not read"
            _, quick = await case.start()
            assert (await quick.chat.completions.create(model="other", messages=HELLO)).choices
            writer.transport.abort()
            span = await case.eventual_span(rollout)
            assert span.attributes["agentlightning.gateway.complete"] is False
            await until(lambda: server.connections <= 1)  # a health check may hold one
            del reader


async def begin_stream(base_url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a call for a stream over a raw connection and reads nothing."""
    url = urlsplit(base_url)
    assert url.hostname is not None
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=1024)
    text = json.dumps({**ASKED, "stream": True}).encode()
    head = b"Host: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    path = f"{url.path.rstrip('/')}/chat/completions"
    writer.write(b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (path.encode(), head, len(text), text))
    return reader, writer


async def vanish(case: Case) -> None:
    _, client = await case.start()
    _, writer = await begin_stream(str(client.base_url))
    await asyncio.sleep(0.01)
    writer.transport.abort()


async def test_broken_connections_leak_no_tasks_files_or_calls() -> None:
    turn = 0

    async def varies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal turn
        turn += 1
        if turn % 3 == 0:
            await stalls(reader, writer)
        else:
            await sends(STREAM_HEAD + chunk(EVENT), pause_s=0.1, then_resets=turn % 3 == 1)(reader, writer)
            await reader.read()

    async def idle() -> bool:
        return (await case.proxy.status())["in_flight"] == 0

    async with raw_server(varies) as server:
        models = [entry(server.endpoint)]
        async with gateway(model_list=models, num_retries=0, health_interval_s=3600.0) as case:
            launched: Any = case.proxy._launched
            loop: asyncio.AbstractEventLoop = launched._thread._loop
            sizes = []
            for _ in range(3):
                await asyncio.gather(*(vanish(case) for _ in range(25)))
                await until(idle)
                await until(lambda: server.connections == 0)
                gc.collect()
                if sizes:  # the last sockets may close a moment later
                    await until(lambda most=sizes[0][1] + 3: count_open_files() <= most)
                files = count_open_files()
                sizes.append((len(asyncio.all_tasks(loop)), files, len(launched._server._in_flight._by_attempt)))
            await case.proxy.flush()
            spans = (await case.store.statistics())["spans"]
    assert sizes[2][0] <= sizes[0][0], f"tasks grow: {sizes}"
    assert sizes[2][2] == 0
    assert spans == 75, "each call was recorded"


@pytest.mark.slow
async def test_memory_stays_flat_over_hundreds_of_broken_calls() -> None:
    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    event = b"data: " + json.dumps({**CHUNK, "pad": "x" * 20_000}).encode() + b"\n\n"

    async def breaks_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event) * 5)
        writer.close()  # after the bytes

    async with raw_server(breaks_off) as server:
        models = [entry(server.endpoint)]
        async with gateway(model_list=models, num_retries=0) as case:
            root = case.proxy.endpoint  # names no attempt, so that calls are not recorded and the store does not grow

            async def break_off() -> None:
                reader, writer = await begin_stream(root)
                assert b"broke off" in await reader.read()
                writer.close()

            levels = []
            for _ in range(4):
                for _ in range(2):
                    await asyncio.gather(*(break_off() for _ in range(50)))
                gc.collect()
                levels.append(resident_mib())
    assert levels[-1] - levels[1] < 10, f"MiB after each 100 calls, of 100 kB each, that broke: {levels}"


async def test_a_connection_that_the_backend_closed_while_it_was_idle_gets_one_free_try() -> None:
    """A request on such a connection was never read, unlike one that fails on a new connection."""
    answer = json.dumps({"id": "x", "model": "m", "choices": [{"index": 0, "message": {"content": "ok"}}]}).encode()
    served: set[asyncio.StreamWriter] = set()
    dies = False

    async def answers_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer in served or dies:
            writer.transport.abort()
            return
        served.add(writer)
        writer.write(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(answer) + answer)

    async with raw_server(answers_once) as server:
        settings: dict[str, Any] = {"num_retries": 0, "health_interval_s": 3600.0}
        async with gateway(model_list=[entry(server.endpoint)], **settings) as case:
            _, client = await case.start()
            for _ in range(3):
                assert await ask(client, False) == "ok"
            assert (len(served), server.requests) == (3, 5), "each later call first meets the connection of the last"
            dies = True
            with pytest.raises(openai.InternalServerError):
                await ask(client, False)
            assert server.requests == 7, "one on the closed connection, and one on a new connection, which is the last"


async def test_an_agent_gets_comments_while_a_stream_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning_plugins.gateway.relay._SILENCE_S", 0.05)
    was_heard = asyncio.Event()

    async def thinks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(EVENT))
        await was_heard.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))

    lines: list[bytes] = []
    async with raw_server(thinks) as server, gateway(model_list=[entry(server.endpoint)]) as case:
        _, client = await case.start()
        url, headers = f"{client.base_url}chat/completions", {"authorization": f"Bearer {client.api_key}"}
        asked = {**ASKED, "stream": True}
        async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=asked) as answer:
            async for line in answer.content:
                lines.append(line)
                if line.startswith(b":"):
                    was_heard.set()
    assert lines[0].startswith(b"data: {")
    assert lines[-2:] == [b"data: [DONE]\n", b"\n"]


async def test_reasoning_details_are_recorded_and_translated() -> None:
    details = [{"type": "reasoning.text", "text": "Add."}, {"type": "reasoning.encrypted", "data": "x"}]
    message = {"role": "assistant", "content": "3", "reasoning_details": details}
    answered = {"id": "x", "object": "chat.completion", "choices": [{"message": message, "finish_reason": "stop"}]}
    reply = sends(body(json.dumps(answered).encode()))
    async with raw_server(reply) as server, gateway(model_list=[entry(server.endpoint)]) as case:
        rollout, client = await case.start()
        response = await client.responses.create(model="m", input="What is 1 and 2 together?")
        recorded = json.loads(str((await case.span(rollout)).attributes["gen_ai.output.messages"]))
    thought: Any = response.output[0]
    assert thought.content[0].text == "Add."
    assert recorded[0]["parts"] == [{"type": "reasoning", "content": "Add."}, {"type": "text", "content": "3"}]
