"""Runs the gateway's server in a thread or in a process.

The methods of both classes block, and may be called from any thread except the server's own. This module is also the
main module of the process: ``python -m agentlightning_plugins.gateway.launch SOCKET_FD``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import ConfigError, LightningError, StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.gateway.server import GatewayServer, Settings
from agentlightning_plugins.shared.garbage_collection import relax_collector
from agentlightning_plugins.shared.loop_thread import LoopThread
from agentlightning_plugins.shared.web.request import return_freed_memory

logger = logging.getLogger("agentlightning")
_EXIT_S: Final = 5.0


@dataclass
class ServerThread:
    """Runs the server on an event loop in a thread of this process."""

    store: LightningStore
    settings: Settings

    def start(self) -> int:
        """Starts serving and returns the port; raises ConfigError if the address is not available."""
        self._thread = LoopThread("agentlightning-gateway")
        try:
            return self._thread.submit(self._start()).result()
        except BaseException:
            self._thread.close()
            raise

    async def _start(self) -> int:
        self._server = GatewayServer(self.store, self.settings)
        return await self._server.start()

    def call(self, command: str, *arguments: Any) -> Any:
        """Calls a method of ``GatewayServer`` and returns its result or raises its error."""
        return self._thread.submit(getattr(self._server, command)(*arguments)).result()

    def stop(self) -> None:
        """Ends open calls, stores the recorded spans and ends the server."""
        self.call("stop")
        self._thread.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive


class ServerProcess:
    """Runs the server in a new process, which does not import the user's main module."""

    def __init__(self, store: LightningStore, settings: Settings) -> None:
        """Prepares the process; raises ConfigError if the store cannot be reached from another process."""
        self._lock = threading.Lock()
        try:
            self._job = pickle.dumps((store, settings))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"launch_mode='process' needs a store that other processes can reach; {type(store).__name__} lives in "
                "this one: serve it and give LightningStoreClient(url), or use launch_mode='thread'"
            ) from error

    def start(self) -> int:
        """Starts serving and returns the port; raises ConfigError if the address is not available."""
        self._connection, theirs = Pipe()
        with theirs:
            arguments = [sys.executable, "-P", "-m", "agentlightning_plugins.gateway.launch", str(theirs.fileno())]
            self._process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._connection.send([entry or str(Path.cwd()) for entry in sys.path])
        self._connection.send_bytes(self._job)
        port = self._receive()
        if isinstance(port, ConfigError):
            self._process.wait()
            raise port
        assert isinstance(port, int)
        return port

    def call(self, command: str, *arguments: Any) -> Any:
        """Calls a method of ``GatewayServer``, as ``ServerThread.call``; raises StoreError if the process is dead."""
        return self._send((command, *arguments))

    def stop(self) -> None:
        """Ends open calls, stores the recorded spans and ends the process."""
        try:
            self._send("stop")
            self._process.wait(_EXIT_S)
        except (StoreError, subprocess.TimeoutExpired) as error:  # it is killed below, and the caller goes on
            logger.warning("%s", error)
        finally:
            self._process.kill()
            self._process.wait()
            self._connection.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _send(self, message: object) -> Any:
        with self._lock:  # one answer for each message
            with contextlib.suppress(BrokenPipeError):  # receiving raises a better error
                self._connection.send(message)
            answer = self._receive()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            raise StoreError(f"the gateway's process exited with code {code}; calls not yet stored are lost") from None


def main() -> None:
    """Serves in the new process until the parent stops it or exits, which closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when to stop
    connection = Connection(int(sys.argv[1]))
    path: list[str] = connection.recv()  # first, because unpickling the next message may need it
    sys.path += [entry for entry in path if entry not in sys.path]
    store, settings = connection.recv()
    relax_collector()
    return_freed_memory()
    asyncio.run(_serve(connection, store, settings))


async def _serve(connection: Connection, store: LightningStore, settings: Settings) -> None:
    server = GatewayServer(store, settings)
    try:
        connection.send(await server.start())
    except ConfigError as error:
        connection.send(error)
        return
    with contextlib.suppress(EOFError, OSError):  # the parent has exited
        while (message := await asyncio.to_thread(connection.recv)) != "stop":
            command, *arguments = message
            try:
                answer = await getattr(server, command)(*arguments)
            except (LightningError, OSError, ValueError) as error:
                answer = error  # the parent raises it
            connection.send(answer)
    await server.stop()
    await store.close()
    with contextlib.suppress(OSError):  # the parent has exited
        connection.send(None)


if __name__ == "__main__":
    main()
