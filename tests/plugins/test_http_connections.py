"""``Connections``, which servers put between the listening socket and the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from agentlightning_plugins.http_connections import Connections


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_is_accepted_while_the_server_stops_is_closed(turns: int) -> None:
    connections = Connections(asyncio.Protocol)
    address = await connections.listen("127.0.0.1", 0)
    with socket.create_connection(address) as client:
        client.setblocking(False)
        for _ in range(turns):  # of the event loop, which accepts the connection in several
            await asyncio.sleep(0)
        await connections.close()
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 2) == b""
