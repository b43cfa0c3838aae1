"""Connections that clients without a token open to real server processes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.algorithms.tiny_model import save_tiny_model
from tests.security.gateway_process import port_of, process, text_of
from tests.security.store_process import AGL, TOKEN, StoreProcess, running_store

pytestmark = pytest.mark.serial

FILES = 1024
LIMIT = [f"--nofile={FILES}:{FILES}"]
IDLE = 1100


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    """A store that may open 1024 files."""
    with running_store(tmp_path, wrapper=["prlimit", *LIMIT]) as process:
        yield process


@pytest.fixture
def many_files() -> Iterator[None]:
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


@pytest.mark.usefixtures("many_files")
def test_1100_idle_connections_do_not_lock_out_clients_of_a_store(store: StoreProcess) -> None:
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(store.connect())
        assert _is_answered(runner, f"{AGL}/statistics")
        slow = stack.enter_context(store.connect())
        slow.sendall(b"GET / HTTP/1.1\r\n")
        slow_began = time.monotonic()
        idle = [stack.enter_context(store.connect()) for _ in range(IDLE)]
        began = time.monotonic()
        for _ in range(20):
            assert store.ask("GET", f"{AGL}/health").status == 200
            assert store.ask("GET", f"{AGL}/statistics", token=TOKEN).status == 200
        assert time.monotonic() - began < 4, "requests are answered while the idle connections are open"
        for connection in idle:
            _wait_until_closed(connection)
        assert time.monotonic() - began < 20
        _wait_until_closed(slow)
        assert time.monotonic() - slow_began < 30, "the server does not wait longer for the rest of a request"
        assert _is_answered(runner, f"{AGL}/statistics"), "the connection of a client with a token stays open"
    assert store.log.stat().st_size < 20_000, store.log.read_text()[:2000]


@pytest.mark.usefixtures("many_files")
async def test_idle_connections_do_not_lock_out_clients_of_a_gateway(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with LightningStoreServer(InMemoryLightningStore(), port=0, token=TOKEN) as served:
        arguments = ["--store", served.endpoint, "--token", TOKEN, "--port", "0", "--model", "m=http://127.0.0.1:9/v1"]
        command = ["-m", "agentlightning", "gateway", *arguments]
        async with process(log, *command, wrapper=["prlimit", *LIMIT]) as gateway:
            port = await port_of(gateway, log, r"Serving .* at http://127\.0\.0\.1:(\d+)")
            await _check_idle_connections(port, log, "/status", TOKEN)


@pytest.mark.usefixtures("many_files")
async def test_idle_connections_do_not_lock_out_clients_of_a_policy_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    save_tiny_model(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--threads", "1"]
    command = ["-m", "agentlightning_algorithms.grpo.server", *arguments]
    async with process(log, *command, wrapper=["prlimit", *LIMIT]) as server:
        port = await port_of(server, log, r'"port": (\d+)')
        found = re.search(r'"key": "([^"]+)"', text_of(log))
        assert found is not None
        await _check_idle_connections(port, log, "/statistics", found[1])


async def _check_idle_connections(port: int, log: Path, path: str, key: str) -> None:
    """Opens idle connections and checks that requests of other clients are answered."""
    size = len(text_of(log))
    headers = {"Authorization": f"Bearer {key}"}
    one = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers, connector=one) as session:

        async def is_answered(path: str) -> bool:
            async with session.get(path) as response:
                return response.status == 200

        assert await is_answered(path)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(IDLE)]
        began = time.monotonic()
        for _ in range(10):
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as other, other.get("/health") as answer:
                assert answer.status == 200
        assert time.monotonic() - began < 4, "requests are answered while the idle connections are open"
        for reader, writer in idle:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.transport.abort()
        assert time.monotonic() - began < 30
        assert await is_answered(path)
    assert len(text_of(log)) - size < 20_000, text_of(log)[size:][:2000]


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
