"""``PostgresLightningStore``: the engine over one PostgreSQL database."""

from __future__ import annotations

from typing import Self

from agentlightning.errors import ConfigError
from agentlightning.store.engine import BackendStore
from agentlightning.types import DEFAULT_RUN_ID
from agentlightning_plugins.stores.postgresql.backend import PostgresBackend
from agentlightning_plugins.stores.postgresql.connection import Server


class PostgresLightningStore(BackendStore):
    """A store in a PostgreSQL database, for processes on many machines.

    Acknowledged writes are as durable as the server (``fsync`` and ``synchronous_commit`` on, as they are by
    default). Any number of processes can open the same database. Calls wait for a server that restarts, and nothing is
    written twice.
    """

    def __init__(
        self,
        url: str,
        run_id: str = DEFAULT_RUN_ID,
        *,
        lease_s: float = 60.0,
        watchdog_interval_s: float | None = 1.0,
        connections: int = 5,
        statement_timeout_s: float = 50.0,
        connect_timeout_s: float = 10.0,
        reconnect_s: float = 30.0,
    ) -> None:
        """Connects, and creates the schema ``agl`` or migrates it from an older version.

        Args:
            url: ``postgresql://user:password@host:5432/database``, as PostgreSQL's own tools take it; missing parts
                come from the environment (``PGHOST``, ``PGUSER``, ``PGPASSWORD``, ``~/.pgpass``).
            run_id: the run that this object sees.
            lease_s: an attempt is lost after this time without a span or a heartbeat.
            watchdog_interval_s: how late an overdue attempt may be ended; None leaves this to other processes.
            connections: maximum number of connections: one writes, the others read. Further reads queue.
            statement_timeout_s: the server cancels a statement that takes longer. The statement is retried twice.
            connect_timeout_s: how long one attempt to connect may take.
            reconnect_s: how long calls wait for a server that went away before they fail.

        Raises:
            ConfigError: the URL is malformed, a setting is out of range, the server refuses the user, or the schema is
                of a newer version.
            StoreError: the server cannot be reached.
        """
        server = Server(
            url,
            connections=connections,
            statement_timeout_s=statement_timeout_s,
            connect_timeout_s=connect_timeout_s,
            reconnect_s=reconnect_s,
        )
        backend = PostgresBackend(server)
        try:
            super().__init__(backend, run_id, lease_s=lease_s, watchdog_interval_s=watchdog_interval_s)
        except BaseException:
            backend.stop()
            raise

    @classmethod
    def from_url(cls, url: str, *, run_id: str = DEFAULT_RUN_ID, token: str | None = None) -> Self:
        """Opens ``postgresql://...``.

        Raises:
            ConfigError: as the constructor, or a token was given.
        """
        if token is not None:
            raise ConfigError("postgresql:// takes no token: the server asks for the password in the URL")
        return cls(url, run_id)
