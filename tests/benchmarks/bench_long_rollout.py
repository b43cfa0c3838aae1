"""Bytes of a long rollout in a store: ``python tests/benchmarks/bench_long_rollout.py [--turns 40] [--store URL]``.

An agent of 40 turns, each with a tool result of 2.4 kB of source code, calls a scripted model through the gateway. Like
a policy server, the model returns the token ids of the whole prompt, one for each word. A second span for each call
has the messages again, one attribute for each, as instrumentation writes them. Prints the bytes of all spans by
attribute and the bytes that the SQLite file grew by, or the tables and indexes of a PostgreSQL database, also divided
by the bytes of distinct text, then the CPU time of all turns and the time to read all spans.

Target (issue 46): the store grows by at most 1.5 times the distinct text.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import re
import sqlite3
import tempfile
import time
import typing
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import aiohttp
import asyncpg
from aiohttp import web

import agentlightning as agl

SOURCE = "".join(inspect.getsource(module) for module in (argparse, asyncio.tasks, inspect, typing))


def tokenize(text: str) -> list[int]:
    """Returns one id below 150,000 for each word or sign, with the space before it."""
    return [crc32(token.encode()) % 150_000 for token in re.findall(r" ?\w+| ?[^\w\s]+|\s+", text)]


async def run(url: str, turns: int, indexed: bool) -> None:
    rest = iter(SOURCE)
    ids: list[int] = []
    distinct = 0

    def text(length: int) -> str:
        return "".join(islice(rest, length))

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        ids[:] = tokenize("\n".join(message["content"] for message in body["messages"]))
        reply = text(100)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": reply},
            "token_ids": tokenize(reply),
        }
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            | {"prompt_token_ids": ids}
        )

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", answer)
    upstream = web.AppRunner(app)
    await upstream.setup()
    await web.TCPSite(upstream, "127.0.0.1", 0).start()
    store = agl.create_store(url)
    endpoint = f"http://127.0.0.1:{upstream.addresses[0][1]}/v1"
    proxy = agl.LLMProxy(store=store, model_list=[{"model": "m", "endpoint": endpoint, "api_key": "k"}])
    await proxy.start()
    try:
        rollout = await store.start_rollout({})
        key = rollout.rollout_id, rollout.attempt.attempt_id
        resource: Any = proxy.as_resource(*key, model="m")
        before, began = await size(url), time.process_time()
        messages: list[dict[str, Any]] = [{"role": "system", "content": text(2000)}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {resource.api_key}"}) as session:
            for _ in range(turns):
                messages.append({"role": "user", "content": text(2400)})
                async with session.post(
                    f"{resource.endpoint}/chat/completions", json={"model": "m", "messages": messages}
                ) as response:
                    response.raise_for_status()
                    messages.append((await response.json())["choices"][0]["message"])
                if indexed:
                    attributes = {
                        f"gen_ai.prompt.{number}.{name}": message[name]
                        for number, message in enumerate(messages)
                        for name in ("role", "content")
                    }
                    await store.add_span(
                        agl.Span.from_attributes(
                            attributes=attributes, rollout_id=key[0], attempt_id=key[1], name="openai.chat"
                        )
                    )
        wrote_s = time.process_time() - began
        distinct = sum(len(message["content"]) for message in messages)
        began = time.perf_counter()
        spans = await store.query_spans(key[0])
        read_s = time.perf_counter() - began
        by_name: Counter[str] = Counter()
        for span in spans:
            for name, value in span.attributes.items():
                by_name["gen_ai.prompt.*" if ".prompt." in name else name] += len(json.dumps(value))
        print(f"{len(spans)} spans, {distinct / 1e3:.0f} kB of distinct text, {len(ids)} token ids")
        for name, number in by_name.most_common(5):
            print(f"{name:35} {number / 1e3:8.0f} kB {number / distinct:6.1f}")
    finally:
        await proxy.stop()
        await store.close()
        await upstream.cleanup()
    grown = await size(url) - before
    print(f"{'in the store':35} {grown / 1e3:8.0f} kB {grown / distinct:6.2f}")
    print(f"CPU of all {turns} turns {wrote_s:.2f} s; all spans read in {1000 * read_s:.0f} ms")


async def size(url: str) -> int:
    """Returns the bytes of a store: the file's pages, with those that are still in its log, or tables and indexes."""
    if not url.startswith("sqlite:///"):
        connected = await asyncpg.connect(url)
        await connected.execute("VACUUM FULL")  # otherwise a table grows in steps
        grown = await connected.fetchval(
            "SELECT sum(pg_total_relation_size(oid)) FROM pg_class "
            "WHERE relnamespace = 'agl'::regnamespace AND relkind = 'r'"
        )
        await connected.close()
        return int(grown)
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        return 4096 * int(connection.execute("PRAGMA page_count").fetchone()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--store", help="URL of an empty PostgreSQL database; default: new SQLite files")
    arguments = parser.parse_args()
    for indexed in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            print("gateway and instrumentation" if indexed else "gateway alone")
            url = arguments.store or f"sqlite:///{Path(folder) / 'store.db'}"
            asyncio.run(run(url, arguments.turns, indexed))


if __name__ == "__main__":
    main()
