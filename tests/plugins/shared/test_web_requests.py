"""The library with which servers read requests."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agentlightning_plugins.shared.web.request import RequestRefused, is_local_request, parse_json, read_body
from agentlightning_plugins.shared.web.server import WebServer

LIMIT = 1000
INFLATED_LIMIT = 50_000


@contextlib.asynccontextmanager
async def body_server() -> AsyncIterator[str]:
    """Serves requests with the size of their body, or with the reason for its refusal."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return web.Response(text=str(len(await read_body(request, LIMIT, INFLATED_LIMIT))))
        except RequestRefused as error:
            return web.Response(status=error.status, text=str(error))

    app = web.Application()
    app.add_routes([web.post("/", answer)])
    server = WebServer(app, finish_s=1.0)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        await server.stop()


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


FULL = b"x" * INFLATED_LIMIT


@pytest.mark.parametrize(
    ("encoding", "body", "status", "text"),
    [
        ("", b"x" * LIMIT, 200, str(LIMIT)),
        ("", b"x" * (LIMIT + 1), 413, "larger than 1000 bytes"),
        ("gzip", gzip.compress(FULL), 200, str(INFLATED_LIMIT)),
        ("gzip", gzip.compress(FULL[:9]) + gzip.compress(FULL[9:]) + b"\0\0", 200, str(INFLATED_LIMIT)),
        ("gzip", gzip.compress(FULL) + gzip.compress(b"x"), 413, "after inflating"),
        ("deflate", zlib.compress(FULL), 200, str(INFLATED_LIMIT)),
        ("deflate", raw_deflate(FULL), 200, str(INFLATED_LIMIT)),
        ("deflate", zlib.compress(FULL + b"x"), 413, "after inflating"),
        ("gzip", gzip.compress(FULL)[:-9], 400, "not complete"),
        ("gzip", b"not gzip", 400, "Content-Encoding"),
        ("br", b"x", 415, "send gzip, deflate or no encoding"),
        ("zstd", b"x", 415, "send gzip, deflate or no encoding"),
    ],
)
async def test_a_body_is_inflated_up_to_its_limit(encoding: str, body: bytes, status: int, text: str) -> None:
    headers = {"Content-Encoding": encoding} if encoding else {}

    async def pieces() -> AsyncIterator[bytes]:
        yield body

    async with body_server() as url, aiohttp.ClientSession() as session:
        for data in (body, pieces()):  # with and without Content-Length
            async with session.post(url, data=data, headers=headers) as response:
                assert response.status == status
                assert text in await response.text()


@pytest.mark.parametrize(
    ("text", "limits", "status"),
    [
        (b"[" * 3 + b"]" * 3, {"max_depth": 3}, 200),
        (b"[" * 4 + b"]" * 4, {"max_depth": 3}, 400),
        (b'{"a":{"a":[1]}}', {"max_depth": 2}, 400),
        (b"[1" + b",1" * 98 + b"]", {"max_items": 100}, 200),
        (b"[1" + b",1" * 99 + b"]", {"max_items": 100}, 413),
        (json.dumps("[{,]" * 100 + '\\"\\').encode(), {"max_items": 100}, 200),
        (b'["' + b"\\" * 200, {"max_items": 100}, 400),
        (b"{", {}, 400),
    ],
)
async def test_json_is_parsed_up_to_its_limits(text: bytes, limits: dict[str, Any], status: int) -> None:
    if status == 200:
        assert await parse_json(text, **limits) == json.loads(text)
        return
    with pytest.raises(RequestRefused) as caught:
        await parse_json(text, **limits)
    assert caught.value.status == status


async def test_large_json_is_parsed_and_the_last_value_of_a_duplicate_key_counts() -> None:
    value = {"messages": ["text, with [brackets] " * 10] * 5000}
    assert await parse_json(json.dumps(value).encode()) == value
    assert await parse_json(b'{"a": 1, "a": 2}') == {"a": 2}


@pytest.mark.parametrize(
    ("host", "origin", "is_local"),
    [
        ("127.0.0.1:80", None, True),
        ("localhost", None, True),
        ("[::1]:80", "http://[::1]:80", True),
        ("127.0.0.1:80", "http://127.0.0.1:81", False),
        ("127.0.0.1:80", "null", False),
        ("rebound.example:80", None, False),
        ("rebound.example:80", "http://rebound.example:80", False),
        ("", None, False),
        ("[::1", None, False),
    ],
)
def test_requests_of_web_pages_do_not_count_as_local(host: str, origin: str | None, is_local: bool) -> None:
    assert is_local_request(host, origin) is is_local
