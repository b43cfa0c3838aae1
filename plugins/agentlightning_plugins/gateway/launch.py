"""Where the gateway's server runs. Every method blocks, and may be called from any thread but the server's own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.gateway.server import GatewayServer
from agentlightning_plugins.gateway.settings import Settings

logger = logging.getLogger("agentlightning")
T = TypeVar("T")
COMMANDS: Final = frozenset({"set_models", "flush", "pause", "drain", "resume", "status"})
"""The methods of ``GatewayServer`` by which it is steered."""
_EXIT_S: Final = 5.0


class ServerHandle(Protocol):
    """A gateway server that somebody else can steer."""

    def start(self) -> int:
        """Begins to serve and returns the port; raises OSError when the address cannot be bound."""
        ...

    def ask(self, command: str, *arguments: Any) -> Any:
        """Calls a method of the server, one of ``COMMANDS``, and returns what it returns.

        Raises:
            StoreError: the server's process is gone.
            Exception: what the method raised.
        """
        ...

    def stop(self) -> None:
        """Ends open calls, stores what was recorded and ends the server."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether what runs the server is still there."""
        ...


class ServerThread:
    """Runs the server on an event loop in a thread of this process."""

    def __init__(self, store: LightningStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    def start(self) -> int:
        started: Future[int] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="agentlightning-gateway", daemon=True
        )
        self._thread.start()
        return started.result()

    def ask(self, command: str, *arguments: Any) -> Any:
        return self._run(getattr(self._server, command)(*arguments))

    def stop(self) -> None:
        self._run(self._server.stop())
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def _serve(self, started: Future[int]) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        try:
            self._server = GatewayServer(self._store, self._settings)
            port = await self._server.start()
        except BaseException as error:  # isolation point: whatever it is belongs to the caller of start
            started.set_exception(error)
            return
        started.set_result(port)
        await self._stopped.wait()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class ServerProcess:
    """Runs the server in a process of its own, started from scratch: the user's main module is not imported again."""

    def __init__(self, store: LightningStore, settings: Settings) -> None:
        """Prepares the process.

        Raises:
            ConfigError: the store cannot be reached from another process.
        """
        self._lock = threading.Lock()
        try:
            self._job = pickle.dumps((store, settings))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"launch_mode='process' needs a store that other processes can reach; {type(store).__name__} lives in "
                "this one: serve it and give LightningStoreClient(url), or use launch_mode='thread'"
            ) from error

    def start(self) -> int:
        self._connection, theirs = Pipe()
        with theirs:
            arguments = [sys.executable, "-m", "agentlightning_plugins.gateway.child", str(theirs.fileno())]
            self._process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._connection.send([entry or str(Path.cwd()) for entry in sys.path])
        self._connection.send_bytes(self._job)
        port = self._receive()
        if isinstance(port, OSError):
            self._process.wait()
            raise port
        assert isinstance(port, int)
        return port

    def ask(self, command: str, *arguments: Any) -> Any:
        return self._ask((command, *arguments))

    def stop(self) -> None:
        try:
            self._ask("stop")
            self._process.wait(_EXIT_S)
        except (StoreError, subprocess.TimeoutExpired) as error:  # nothing is left to stop, and the caller goes on
            logger.warning("%s", error)
        finally:
            self._process.kill()
            self._process.wait()
            self._connection.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _ask(self, command: object) -> Any:
        with self._lock:  # one question, one answer
            with contextlib.suppress(BrokenPipeError):  # receiving says it better
                self._connection.send(command)
            answer = self._receive()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            raise StoreError(
                f"the gateway's process died with exit code {code}; calls that it had not stored are lost"
            ) from None
