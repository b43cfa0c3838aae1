"""A real PostgreSQL for the tests of stores: one server for the session, a database for each test."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.postgresql import PostgresServer, running_server

_NEEDED_BYTES = 2**31


def _find_quick_parent() -> Path:
    """Returns a folder in memory if available, where fsync is free and files survive killed processes."""
    memory = Path("/dev/shm")  # safe to share: the folders made in it have random names
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _NEEDED_BYTES
    return memory if has_room else Path("/tmp")  # safe for the same reason


@pytest.fixture(scope="session")
def quick_parent() -> Path:
    return _find_quick_parent()


@pytest.fixture
def quick_path(quick_parent: Path) -> Iterator[Path]:
    """An empty folder in which commits are quick."""
    with tempfile.TemporaryDirectory(prefix="agl-", dir=quick_parent) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def postgresql_server(quick_parent: Path) -> Iterator[PostgresServer]:
    with running_server(quick_parent, max_connections=60) as server:
        yield server


@pytest.fixture
def own_server(postgresql_server: PostgresServer) -> Iterator[PostgresServer]:
    """The server with an empty database, which the test may kill: no other test of this process runs meanwhile."""
    yield postgresql_server
    postgresql_server.empty()


@pytest.fixture
def make_database(postgresql_server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Creates a database and returns its URL. Tests that do not kill the server need no ``durable`` database."""
    made: list[str] = []
    failed = request.session.testsfailed

    def make(*, durable: bool = False) -> str:
        made.append(postgresql_server.lend_database(durable=durable))
        return postgresql_server.url(made[-1])

    yield make
    if request.session.testsfailed == failed:  # a failed test may have left a store open, whose watchdog goes on
        for name in made:
            postgresql_server.take_back(name)


@pytest.fixture
def database(make_database: Callable[..., str]) -> str:
    """The URL of an empty database."""
    return make_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, quick_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{quick_path}/store.db"
    make: Callable[[], str] = request.getfixturevalue("make_database")
    return make()
