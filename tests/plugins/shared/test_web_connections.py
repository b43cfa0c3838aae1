"""``ConnectionLimits``, which servers put between the listening socket and the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
import uvloop
from aiohttp import web

from agentlightning_plugins.shared.web.server import ConnectionLimits, WebServer


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
