"""Connections that clients without a token open to a store, tried at a real server process."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.store_process import AGL, TOKEN, StoreProcess, running_store

FILES = 1024
IDLE = 1100


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    """A store that may open 1024 files."""
    limit = [f"--nofile={FILES}:{FILES}"]
    with running_store(tmp_path, wrapper=["prlimit", *limit]) as process:
        yield process


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2 * IDLE), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _is_answered(connection: socket.socket, path: str) -> bool:
    """Whether a request on an open connection is answered with 200."""
    head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
    connection.sendall(head.encode())
    return b" 200 " in connection.recv(65536)


def _wait_until_closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass


@pytest.mark.usefixtures("many_files")
def test_1100_idle_connections_lock_no_client_out(store: StoreProcess) -> None:
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
        assert time.monotonic() - began < 4, "they are answered while the idle connections are open"
        for connection in idle:
            _wait_until_closed(connection)
        assert time.monotonic() - began < 20
        _wait_until_closed(slow)
        assert time.monotonic() - slow_began < 30, "a request that does not arrive is not waited for"
        assert _is_answered(runner, f"{AGL}/statistics"), "the connection of a client with a token stays open"
    assert store.log.stat().st_size < 20_000, store.log.read_text()[:2000]


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
