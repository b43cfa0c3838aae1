"""The gateway in a process of its own: ``python -m agentlightning_plugins.gateway.child SOCKET_FD``.

``launch.ServerProcess`` starts it and sends it commands over the inherited socket. It ends when the socket closes,
because then the parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from agentlightning.errors import LightningError
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.garbage_collection import relax_collector
from agentlightning_plugins.gateway.launch import COMMANDS
from agentlightning_plugins.gateway.server import GatewayServer
from agentlightning_plugins.gateway.settings import Settings


def main() -> None:
    """Serves until the parent stops it or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when to stop
    connection = Connection(int(sys.argv[1]))
    path: list[str] = connection.recv()  # first, because unpickling the next message may need it
    sys.path += [entry for entry in path if entry not in sys.path]
    store, settings = connection.recv()
    relax_collector()
    asyncio.run(_serve(connection, store, settings))


async def _serve(connection: Connection, store: LightningStore, settings: Settings) -> None:
    server = GatewayServer(store, settings)
    try:
        connection.send(await server.start())
    except OSError as error:
        connection.send(error)
        return
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while (command := await asyncio.to_thread(connection.recv)) != "stop":
            connection.send(await _call(server, *command))
    await server.stop()
    await store.close()
    with contextlib.suppress(OSError):  # the parent is gone
        connection.send(None)


async def _call(server: GatewayServer, command: str, *arguments: Any) -> Any:
    """Returns the result of a command or its error, which the parent raises."""
    assert command in COMMANDS, command
    try:
        return await getattr(server, command)(*arguments)
    except (LightningError, OSError) as error:
        return error


if __name__ == "__main__":
    main()
