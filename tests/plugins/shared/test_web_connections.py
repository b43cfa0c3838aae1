"""``ConnectionLimits``, which servers put between the listening socket and the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time

import aiohttp
import pytest
import uvloop
from aiohttp import web

from agentlightning_plugins.shared.loop_thread import LoopThread
from agentlightning_plugins.shared.web import server as web_server
from agentlightning_plugins.shared.web.server import ConnectionLimits, WebServer
from tests.waiting import LIMIT_S, until


def test_connections_reach_the_http_server_under_uvloop() -> None:
    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)

    async def serve() -> bytes:
        connections = ConnectionLimits(Echo)
        reader, writer = await asyncio.open_connection("127.0.0.1", await connections.listen("127.0.0.1", 0))
        writer.write(b"hello")
        answer = await asyncio.wait_for(reader.readexactly(5), 10)
        writer.close()
        await connections.close()
        return answer

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(serve()) == b"hello"


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_is_accepted_while_the_server_stops_is_closed(turns: int) -> None:
    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        raise web.HTTPNotFound

    server = WebServer(refuse, finish_s=1.0)
    address = "127.0.0.1", await server.start("127.0.0.1", 0)
    with socket.create_connection(address) as client:
        client.setblocking(False)
        for _ in range(turns):  # the event loop accepts the connection over several turns
            await asyncio.sleep(0)
        await server.stop()
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 2) == b""


async def test_a_busy_server_closes_no_connection_whose_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "MAX_UNKNOWN", 16)
    monkeypatch.setattr(web_server, "GRACE_S", 0.01)

    began, written = threading.Event(), threading.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        server.admit(request)
        began.set()
        written.wait(LIMIT_S)  # a busy event loop, while the other clients connect and write
        time.sleep(0.002)  # noqa: ASYNC251 # and goes on being busy
        return web.Response(text="ok")

    thread = LoopThread("busy-server")
    server = WebServer(answer, finish_s=1.0)
    port = await asyncio.wrap_future(thread.submit(server.start("127.0.0.1", 0, backlog=1024)))
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(32)]

    async def ask() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        return reader, writer

    asked = [await ask()]
    await until(began.is_set)
    asked += [await ask() for _ in range(200)]
    written.set()
    assert {await reader.readline() for reader, _ in asked} == {b"HTTP/1.1 200 OK\r\n"}
    for _, writer in asked:
        writer.close()
    with contextlib.suppress(ConnectionResetError):
        assert await silent[0][0].read() == b"", "a silent one is closed instead"
    for _, writer in silent:
        writer.close()
    await asyncio.wrap_future(thread.submit(server.stop()))
    await asyncio.to_thread(thread.close)


async def test_if_all_connections_are_in_use_a_request_gets_status_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, 0))  # 128 connections, the least
    never = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        server.admit(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await never.wait()
        return response

    server = WebServer(answer, finish_s=0.1)
    url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}/"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = [await session.get(url) for _ in range(128)]
        async with session.post(url, data=b"x" * 100_000) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        streams.pop().close()

        async def has_place() -> bool:
            async with session.get(url) as response:
                return response.status == 200

        await until(has_place)
        for stream in streams:
            stream.close()
    await server.stop()
