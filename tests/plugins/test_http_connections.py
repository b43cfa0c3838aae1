"""``Connections``, which servers put between the listening socket and the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
import uvloop

from agentlightning_plugins.http_connections import Connections


def test_connections_reach_the_http_server_under_uvloop() -> None:
    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)

    async def serve() -> bytes:
        connections = Connections(Echo)
        reader, writer = await asyncio.open_connection(*await connections.listen("127.0.0.1", 0))
        writer.write(b"hello")
        answer = await asyncio.wait_for(reader.readexactly(5), 10)
        writer.close()
        await connections.close()
        return answer

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(serve()) == b"hello"


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_is_accepted_while_the_server_stops_is_closed(turns: int) -> None:
    connections = Connections(asyncio.Protocol)
    address = await connections.listen("127.0.0.1", 0)
    with socket.create_connection(address) as client:
        client.setblocking(False)
        for _ in range(turns):  # the event loop accepts the connection over several turns
            await asyncio.sleep(0)
        await connections.close()
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 2) == b""
