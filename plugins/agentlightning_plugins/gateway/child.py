"""The gateway in a process of its own: ``python -m agentlightning_plugins.gateway.child SOCKET_FD``.

``launch.ServerProcess`` starts it and steers it over the inherited socket, whose end means that the parent is gone.
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
    """Serves until it is told to stop or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when we stop
    connection = Connection(int(sys.argv[1]))
    path: list[str] = connection.recv()  # first and alone: what comes next may need it to be unpickled
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
            connection.send(await _obey(server, command))
    await server.stop()
    await store.close()
    with contextlib.suppress(OSError):  # nobody may be there to hear it
        connection.send(None)


async def _obey(server: GatewayServer, command: tuple[Any, ...]) -> Any:
    """What a command gives, or the error that it raised, which is the parent's: calls go on."""
    name, *arguments = command
    assert name in COMMANDS, name
    try:
        return await getattr(server, name)(*arguments)
    except (LightningError, OSError) as error:
        return error


if __name__ == "__main__":
    main()
