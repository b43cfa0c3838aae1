"""Cost of the gateway: ``python tests/benchmarks/bench_gateway.py [--runs 5] [--streams 1000]``.

Upstream, load, gateway and a bare aiohttp reverse proxy without capture are separate processes. The upstream answers
immediately with 5.9 KB: 60 tokens with ids and log-probabilities; capture is on. Runs are interleaved (direct,
bare, gateway, direct, ...) and medians are printed, with the ratio to the bare proxy of the same run.

The bare proxy streams: headers and both bodies pass piece by piece as they arrive.

A long call has a history of 40 turns with tools, 100 kB in all, and is answered with the ids of its 25,000 tokens.

Targets: added latency p50 <= 2 ms sequentially; CPU per request <= 2 x bare, per long call <= 1.5 x bare; added time to
first token <= 2 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

TOKENS = 60
REQUEST = {
    "model": "m",
    "temperature": 1.0,
    "messages": [{"role": "system", "content": "You are a calculator. " * 10}, {"role": "user", "content": "6 x 7?"}],
}
TURNS, HISTORY_BYTES = 40, 100_000


def long_request() -> dict[str, Any]:
    """Returns a request of a coding agent after ``TURNS`` turns."""
    messages = list(REQUEST["messages"])
    result = "the quick brown fox\n" * (HISTORY_BYTES // TURNS // 20 - 10)
    for turn in range(TURNS):
        function = {"name": "read_file", "arguments": json.dumps({"path": f"src/module_{turn}.py", "limit": 100})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": result})
    tool = {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
    return REQUEST | {"messages": messages, "tools": [{"type": "function", "function": tool}]}


def answer(*, chunk: int | None = None, prompt_tokens: int = 80) -> dict[str, Any]:
    """Returns a whole answer, or one chunk of a streamed answer."""
    count = TOKENS if chunk is None else 1
    tokens = [
        {"token": "tok", "logprob": -0.123456789, "bytes": [116, 111, 107], "top_logprobs": []} for _ in range(count)
    ]
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop" if chunk in (None, TOKENS - 1) else None,
        "logprobs": {"content": tokens},
        "token_ids": [1234] * count,
    }
    choice["message" if chunk is None else "delta"] = {"role": "assistant", "content": "tok" * count}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    if not chunk:
        head["prompt_token_ids"] = [4321] * prompt_tokens
    return head | {"weight_version": 1}


def dump(value: Any) -> bytes:
    """Returns JSON as model servers write it, without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


BODY, LONG_BODY = dump(answer()), dump(answer(prompt_tokens=HISTORY_BYTES // 4))
NOT_PASSED = frozenset(("host", "connection", "transfer-encoding"))  # each hop sets these headers itself
EVENTS = [b"data: %b\n\n" % dump(answer(chunk=i)) for i in range(TOKENS)] + [b"data: [DONE]\n\n"]


async def serve_upstream(pause_s: float) -> AsyncIterator[str]:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if b'"stream": true' not in body:
            whole = LONG_BODY if len(body) > HISTORY_BYTES // 2 else BODY
            return web.Response(body=whole, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in EVENTS:
            await response.write(event)
            if pause_s:
                await asyncio.sleep(pause_s)
        return response

    async for port in _listen(handle):
        yield f"http://127.0.0.1:{port}/v1"


async def serve_bare(upstream: str) -> AsyncIterator[str]:
    """Serves a minimal streaming reverse proxy: headers and both bodies pass piece by piece as they arrive."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            url = upstream + request.path.removeprefix("/v1")
            headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_PASSED}
            async with session.post(url, data=request.content, headers=headers, allow_redirects=False) as answer:
                headers = {name: value for name, value in answer.headers.items() if name.lower() not in NOT_PASSED}
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
            return response

        async for port in _listen(handle):
            yield f"http://127.0.0.1:{port}/v1"


async def serve_store(_: None) -> AsyncIterator[str]:
    from agentlightning_plugins.stores.http.server import LightningStoreServer
    from agentlightning_plugins.stores.memory.store import InMemoryLightningStore

    async with LightningStoreServer(InMemoryLightningStore(), port=0) as server:
        yield server.endpoint


async def serve_gateway(upstream: str, store_url: str = "memory://") -> AsyncIterator[str]:
    from agentlightning.store.factory import create_store
    from agentlightning_plugins.gateway.proxy import LLMProxy
    from agentlightning_plugins.shared.garbage_collection import relax_collector

    os.environ["AGL_ATTEMPT_MIB"] = "65536"  # all calls belong to one attempt
    relax_collector()  # as `agl gateway` and launch_mode="process" do
    store = create_store(store_url)
    proxy = LLMProxy(model_list=[{"model": "m", "endpoint": upstream, "api_key": "k"}], store=store, require_keys=False)
    await proxy.start()
    rollout = await store.start_rollout(None)
    yield proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id).endpoint
    await proxy.flush()
    print(f"spans recorded: {(await store.statistics())['spans']:.0f}")
    await proxy.stop()
    await store.close()


async def _listen(handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncIterator[int]:
    runner = web.ServerRunner(web.Server(handle, access_log=None), shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


def serve(pipe: Connection, role: Callable[..., AsyncIterator[str]], *arguments: Any) -> None:
    """Runs a server and sends its CPU time and resident memory whenever the parent requests them."""

    async def main() -> None:
        async for endpoint in role(*arguments):
            pipe.send(endpoint)
            while await asyncio.to_thread(pipe.recv):
                pages = int(Path("/proc/self/statm").read_text().split()[1])  # noqa: ASYNC240 # /proc is not a disk
                pipe.send((time.process_time(), pages * 4096 / 2**20))

    asyncio.run(main())


def load(pipe: Connection) -> None:
    """Sends requests: receives (url, count, concurrency, kind) and returns the seconds to the first byte of each."""
    bodies = {
        "short": json.dumps(REQUEST).encode(),
        "stream": json.dumps(REQUEST | {"stream": True}).encode(),
        "long": json.dumps(long_request()).encode(),
    }

    async def run(url: str, count: int, concurrency: int, kind: str) -> list[float]:
        body = bodies[kind]
        headers = {"Content-Type": "application/json"}
        taken: list[float] = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def work(share: int) -> None:
                for _ in range(share):
                    start = time.perf_counter()
                    try:
                        async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                            if response.status == 200:
                                await response.content.readany()
                                taken.append(time.perf_counter() - start)
                            await response.read()
                    except aiohttp.ClientError as error:
                        print(f"a call failed: {error!r}")

            await asyncio.gather(*(work(count // concurrency) for _ in range(concurrency)))
        return taken

    while job := pipe.recv():
        pipe.send(asyncio.run(run(*job)))


class Child:
    """A child process and the pipe to it."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments))
        self._process.start()

    def ask(self, question: Any) -> Any:
        self.pipe.send(question)
        return self.pipe.recv()

    def stop(self) -> None:
        self.pipe.send(None)
        self._process.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=0, help="also hold this many concurrent slow streams")
    arguments = parser.parse_args()
    upstream = Child(serve, serve_upstream, 0.0)
    url = upstream.pipe.recv()
    servers = {"bare": Child(serve, serve_bare, url), "gateway": Child(serve, serve_gateway, url)}
    urls = {"direct": url} | {name: server.pipe.recv() for name, server in servers.items()}
    client = Child(load)
    names = ("latency ms", "cpu ms", "stream cpu ms", "long cpu ms", "first token ms")
    seen: dict[str, dict[str, list[float]]] = {name: {target: [] for target in urls} for name in names}
    for target in urls:  # warm up: the first run does not count
        client.ask((urls[target], 100, 4, "short"))
    for _ in range(arguments.runs):
        for target, endpoint in urls.items():
            taken = client.ask((endpoint, arguments.requests, 1, "short"))
            seen["latency ms"][target].append(1000 * statistics.median(taken))
            taken = client.ask((endpoint, arguments.requests // 5, 1, "stream"))
            seen["first token ms"][target].append(1000 * statistics.median(taken))
            for name, kind, count in (
                ("cpu ms", "short", 2 * arguments.requests),
                ("stream cpu ms", "stream", 400),
                ("long cpu ms", "long", 400),
            ):
                before = servers[target].ask(True)[0] if target in servers else 0.0
                client.ask((endpoint, count, 16, kind))
                after = servers[target].ask(True)[0] if target in servers else 0.0
                seen[name][target].append(1000 * (after - before) / count)
    columns = ("direct", "bare", "gateway", "added", "ratio")
    print(f"medians of {arguments.runs}".ljust(16) + "".join(f"{column:>10}" for column in columns))
    for name, by_target in seen.items():
        direct, bare, gateway = (statistics.median(by_target[target]) for target in ("direct", "bare", "gateway"))
        ratio = statistics.median(g / b for g, b in zip(by_target["gateway"], by_target["bare"], strict=True))
        print(f"{name:16}{direct:10.3f}{bare:10.3f}{gateway:10.3f}{gateway - direct:10.3f}{ratio:10.2f}")
    if arguments.streams:
        hold_streams(arguments.streams, client)
    for child in (client, *servers.values(), upstream):
        child.stop()


def hold_streams(count: int, client: Child) -> None:
    """Prints first tokens, lost calls and the gateway's memory in rounds of many slow streams at once.

    The store is a separate process. A call is lost if it ends without status 200.
    """
    slow, store = Child(serve, serve_upstream, 0.1), Child(serve, serve_store, None)
    direct = slow.pipe.recv()
    gateway = Child(serve, serve_gateway, direct, store.pipe.recv())
    endpoint, memory = gateway.pipe.recv(), [gateway.ask(True)[1]]
    taken: dict[str, list[float]] = {direct: [], endpoint: []}
    for _ in range(5):
        for url, seconds in taken.items():
            seconds += client.ask((url, count, count, "stream"))
        memory.append(gateway.ask(True)[1])
    for name, seconds in zip(("direct", "gateway"), taken.values(), strict=True):
        low, high = statistics.median(seconds), sorted(seconds)[len(seconds) * 99 // 100]
        lost = 5 * count - len(seconds)
        print(f"{count} streams at once, {name}: first token p50 {low:.2f} s, p99 {high:.2f} s; {lost} calls lost")
    print("memory of the gateway: " + " -> ".join(f"{value:.0f}" for value in memory) + " MiB")
    for child in (gateway, store, slow):
        child.stop()


if __name__ == "__main__":
    main()
