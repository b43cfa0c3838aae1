"""Connections that clients without a token open to real server processes."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

import agentlightning as agl
from agentlightning_plugins.dashboard.dashboard import Dashboard
from agentlightning_plugins.shared.web import server as web_server
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.security.fuzz import send
from tests.security.gateway_process import port_of, process, text_of
from tests.security.store_process import AGL, TOKEN, StoreProcess, running_store
from tests.waiting import LIMIT_S

FILES = 1024
PRLIMIT = ["prlimit", f"--nofile={FILES}:{FILES}"]
IDLE = 1100
PATIENT = "from agentlightning_plugins.shared.web import server; server.KEEPALIVE_S = 3600.0"
"""Makes a server close connections only because there are too many, so that the machine may be slow."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    """A store that may open 1024 files."""
    with running_store(tmp_path, wrapper=PRLIMIT, before=PATIENT) as process:
        yield process


def patient(module: str) -> tuple[str, str]:
    """Returns the arguments of Python that run a module as a patient server."""
    return "-c", f"{PATIENT}; import runpy; runpy.run_module({module!r}, run_name='__main__')"


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Lets this process open the other ends of the connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2 * IDLE), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _is_answered(connection: socket.socket, path: str) -> bool:
    """Returns whether a request on an open connection is answered with 200."""
    head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
    connection.sendall(head.encode())
    return b" 200 " in connection.recv(65536)


def _wait_until_closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass


def test_1100_idle_connections_do_not_lock_out_clients_of_a_store(store: StoreProcess) -> None:
    with many_files(), contextlib.ExitStack() as stack:
        runner = stack.enter_context(store.connect())
        assert _is_answered(runner, f"{AGL}/statistics")
        idle = [stack.enter_context(store.connect()) for _ in range(IDLE)]
        for _ in range(20):
            assert store.ask("GET", f"{AGL}/health").status == 200
            assert store.ask("GET", f"{AGL}/statistics", token=TOKEN).status == 200
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # it is open
            idle[-1].recv(1)
        assert _is_answered(runner, f"{AGL}/statistics"), "the connection of a client with a token stays open"
    assert store.log.stat().st_size < 20_000, store.log.read_text()[:2000]


async def test_idle_connections_do_not_lock_out_clients_of_a_gateway(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with LightningStoreServer(InMemoryLightningStore(), port=0, token=TOKEN) as served:
        arguments = ["--store", served.endpoint, "--token", TOKEN, "--port", "0", "--model", "m=http://127.0.0.1:9/v1"]
        async with process(log, *patient("agentlightning"), "gateway", *arguments, wrapper=PRLIMIT) as gateway:
            port = await port_of(gateway, log, r"Serving .* at http://127\.0\.0\.1:(\d+)")
            await check_idle_connections(port, log, "/status", TOKEN)


async def check_idle_connections(port: int, log: Path, path: str, key: str, *, probe: str = "/health") -> None:
    """Opens idle connections and checks that requests of other clients, for a path without a key, are answered."""
    size = len(text_of(log))
    headers = {"Authorization": f"Bearer {key}"}
    one = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers, connector=one) as session:

        async def is_answered(path: str) -> bool:
            async with session.get(path) as response:
                return response.status == 200

        assert await is_answered(path)
        with many_files():
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(IDLE)]
            for _ in range(10):
                async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as other, other.get(probe) as answer:
                    assert answer.status == 200
            assert not idle[-1][0].at_eof(), "it is open"
            for _, writer in idle:
                writer.transport.abort()
        assert await is_answered(path)
    assert len(text_of(log)) - size < 20_000, text_of(log)[size:][:2000]


async def test_a_connection_on_which_no_complete_request_arrives_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "KEEPALIVE_S", 0.1)
    async with LightningStoreServer(InMemoryLightningStore(), port=0) as server:
        for sent in (b"", b"GET / HTTP/1.1\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), LIMIT_S)
            writer.transport.abort()


def test_a_request_that_cannot_be_parsed_leaves_no_secret_in_the_log(store: StoreProcess) -> None:
    for head in (
        f"GET {AGL}/statistics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\nX {TOKEN}\r\n\r\n",
        f"GET {AGL}/statistics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\x00\r\n\r\n",
        f"{TOKEN} HTTP/1.1\r\n\r\n",
    ):
        for _ in range(50):
            with store.connect() as connection:
                connection.sendall(head.encode())
                _wait_until_closed(connection)
    log = store.log.read_text()
    assert TOKEN not in log
    assert len(log) < 5000


@pytest.mark.parametrize("command", ["dashboard store.db", "gateway --model m=URL"])
async def test_every_server_may_open_as_many_files_as_the_system_allows_and_ends_on_sigterm(
    tmp_path: Path, command: str
) -> None:
    store = agl.create_store(f"sqlite:///{tmp_path}/store.db")
    await store.close()
    words = command.replace("store.db", f"{tmp_path}/store.db").replace("URL", "http://127.0.0.1:9/v1").split()
    if words[0] == "gateway":
        words += ["--store", f"sqlite:///{tmp_path}/store.db"]
    log = tmp_path / "log"
    async with process(
        log, "-m", "agentlightning", *words, "--port", "0", wrapper=["prlimit", "--nofile=256:1500"]
    ) as server:
        await port_of(server, log, r" at http://127\.0\.0\.1:(\d+)")
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (1500, 1500)
        server.terminate()
        assert await server.wait() == 0, text_of(log)


@pytest.mark.parametrize(
    "command", ["store --backend memory://", "gateway --model m=http://127.0.0.1:9/v1 --store http://127.0.0.1:9"]
)
def test_a_server_that_may_open_too_few_files_says_so(command: str) -> None:
    limited = ["prlimit", "--nofile=24:24", sys.executable, "-m", "agentlightning", *command.split(), "--port", "0"]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "may open 24 files, and a server needs 64; raise ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line", ["GET /runs/default", "DELETE /v1/agl/health", "GET /nothing", "POST /v1/agl/rollouts"]
)
async def test_a_header_that_is_not_utf8_is_refused_on_every_path(line: str) -> None:
    store = InMemoryLightningStore()
    async with LightningStoreServer(store, port=0, pages=[Dashboard(store)]) as server:
        head = f"{line} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nExpect: \xff\r\n\r\n"
        assert await send(server.port, head.encode("latin-1")) == 417
    await store.close()
