"""A real PostgreSQL for the tests of stores: one server for the session, a database for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.postgresql import PostgresServer, running_server


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgresServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def make_database(postgresql_server: PostgresServer) -> Iterator[Callable[..., str]]:
    """Makes databases, and gives their URLs. Those of tests that kill nothing need not wait for the disk."""
    made: list[str] = []

    def make(*, durable: bool = False) -> str:
        made.append(postgresql_server.lend_database(durable=durable))
        return postgresql_server.url(made[-1])

    yield make
    for name in made:
        postgresql_server.take_back(name)


@pytest.fixture
def database(make_database: Callable[..., str]) -> str:
    """The URL of an empty database."""
    return make_database()
