"""Connections to a PostgreSQL server and the meaning of its errors."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import asyncpg

from agentlightning.errors import ConfigError, StorageFullError, StoreError
from agentlightning_plugins.stores.shared.clock import ServerClock, since_boot

logger = logging.getLogger("agentlightning")

_SETTINGS: Final = {
    "application_name": "lightning",
    "client_encoding": "UTF8",
    # Each of our queries has an index. In a newly filled database, statistics are old or missing, and the planner would
    # read a whole table.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "idle_in_transaction_session_timeout": "10s",
}
_TIME: Final = "SELECT extract(epoch FROM clock_timestamp())::float8"
_AWAY: Final = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InternalClientError,  # asyncpg lost track of the state of the connection, such as after a kill
    asyncpg.TargetServerAttributeNotMatched,  # the URL asks for a primary, and there is only a standby
)
"""Errors after which the server or the network may come back. TimeoutError is an OSError."""


def is_of_outage(error: BaseException) -> bool:
    """Whether an error comes from an outage, which ``Server.reconnect`` logs."""
    return isinstance(error, _AWAY) or isinstance(error.__cause__, _AWAY)


ANSWER_SLACK_S: Final = 10.0
"""A server that cancels a timed-out statement later than this is considered lost."""
_CONNECT_TIMEOUT_S: Final = 10.0
MAX_CANCELLED: Final = 2
"""How often a statement that was cancelled by hand is repeated; a write is done once, however often it is sent."""
_PARAMETERS: Final = ("connections", "statement_timeout_s")


class Server:
    """One database of one server."""

    def __init__(self, url: str, *, connections: int, statement_timeout_s: float, reconnect_s: float) -> None:
        """Parses the URL, whose parameters ``agl_connections`` and ``agl_statement_timeout_s`` override arguments.

        Raises:
            ConfigError: the URL cannot be parsed, or a setting is out of range.
        """
        url, given = _take_settings(url)
        self._url = url
        self.connections = int(given.get("connections", connections))
        self._statement_timeout_s = given.get("statement_timeout_s", statement_timeout_s)
        self._connect_timeout_s = _CONNECT_TIMEOUT_S
        self.reconnect_s = reconnect_s
        if self.connections < 2:
            raise ConfigError(f"connections={self.connections}; a store needs 2 or more: one writes, the others read")
        for name, value in (("statement_timeout_s", self._statement_timeout_s), ("reconnect_s", reconnect_s)):
            if not value > 0:
                raise ConfigError(f"{name}={value}; it must be above 0")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            query = dict(parse_qsl(parts.query))
        except ValueError:  # from None: the text of the error may quote the password
            raise ConfigError(
                "the URL of the PostgreSQL store cannot be read; write postgresql://user:password@host:5432/database "
                "and percent-encode special characters of user and password"
            ) from None
        self._secrets = {secret for secret in (parts.password, query.get("password")) if secret}
        place = f"{host or query.get('host', '')}{f':{port}' if port else ''}"
        user = f"{parts.username}@" if parts.username else ""
        self.shown = f"postgresql://{user}{place}{parts.path}"
        """The URL without its password, for messages."""
        self.clock = ServerClock(self.shown)
        self.away_since: float | None = None
        """Start of the current outage (``time.monotonic()``); None while the server can be reached."""
        self._connected_at = 0.0

    async def connect(self, limit_s: float = math.inf) -> asyncpg.Connection:
        """Opens a connection, whose statements may take ``limit_s`` if the timeout is not shorter.

        Raises:
            ConfigError: the server refuses the user, password or database.
            OSError or asyncpg.PostgresError: the server cannot be reached or is not ready.
        """
        try:
            timeout_s = min(self._statement_timeout_s, limit_s)
            settings = {**_SETTINGS, "statement_timeout": f"{timeout_s * 1000:.0f}ms"}
            return await asyncpg.connect(
                self._url,
                timeout=self._connect_timeout_s,
                command_timeout=timeout_s + ANSWER_SLACK_S,
                server_settings=settings,
            )
        except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as error:
            raise ConfigError(f"{self.shown} refuses this user or password ({error.sqlstate}); check both") from None
        except asyncpg.InvalidCatalogNameError:
            raise ConfigError(
                f"{self.shown}: there is no such database; create it with `createdb`, or name another one"
            ) from None
        except (asyncpg.ClientConfigurationError, ValueError) as error:
            raise ConfigError(f"{self.shown} cannot be used: {self._redact(str(error))}") from None

    async def reconnect(
        self, adopt: Callable[[asyncpg.Connection], Awaitable[None]] | None = None, limit_s: float = math.inf
    ) -> asyncpg.Connection:
        """Opens a connection; waits until an unreachable server comes back.

        Args:
            adopt: prepares the connection; if the connection is lost first, another one is opened after a pause.
            limit_s: as in ``connect``.

        Raises:
            StoreError: the server did not come back in time, or refuses what ``adopt`` does.
            ConfigError: as ``connect``.
        """
        deadline = time.monotonic() + self.reconnect_s
        pause_s = 0.02
        while True:
            began = time.monotonic()
            try:
                connection = await self.connect(limit_s)
                if adopt is not None:
                    await adopt(connection)
            except (*_AWAY, asyncpg.InterfaceError, asyncpg.ReadOnlySQLTransactionError) as error:
                # InterfaceError: it was lost between two statements. ReadOnly...: a standby that may be promoted soon.
                if began > self._connected_at:  # otherwise another call has connected since this one began
                    self._report_outage(error)
                if time.monotonic() + pause_s > deadline:
                    raise self.explain(error) from error
            except asyncpg.PostgresError as error:
                raise self.explain(error) from error
            else:
                self._connected_at = time.monotonic()
                if self.away_since is not None:
                    logger.warning("%s is back after %.1f s", self.shown, time.monotonic() - self.away_since)
                    self.away_since = None
                return connection
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(2 * pause_s, 1.0)

    def is_timed_out(self, began: float, limit_s: float = math.inf) -> bool:
        """Whether work that began at ``began`` was cancelled at the timeout, and not by an administrator."""
        return time.monotonic() - began >= min(self._statement_timeout_s, limit_s)

    def _report_outage(self, error: Exception) -> None:
        """Logs the beginning of an outage; its end is logged by ``reconnect``."""
        if self.away_since is None:
            self.away_since = time.monotonic()
            code = getattr(error, "sqlstate", None) or type(error).__name__
            logger.warning(
                "%s cannot be reached (%s: %s); calls wait up to %g s for it",
                *(self.shown, code, self._redact(str(error)), self.reconnect_s),
            )

    async def measure_clock(self, connection: asyncpg.Connection) -> None:
        """Compares this machine's clock with the server's."""
        await connection.fetchval(_TIME)  # prepares the statement
        sent_at = since_boot()
        self.clock.set(await connection.fetchval(_TIME), sent_at)

    def explain(self, error: Exception) -> Exception:
        """Converts an error of PostgreSQL or the connection to the one for the caller; returns others unchanged."""
        if not isinstance(error, (*_AWAY, asyncpg.PostgresError, asyncpg.InterfaceError)):
            return error
        if isinstance(error, _AWAY):
            meaning = "the server cannot be reached, or went away and did not come back in time"
        else:
            meaning = _MEANINGS.get(getattr(error, "sqlstate", None) or "", "the database failed")
        code = getattr(error, "sqlstate", None) or type(error).__name__
        kind = StorageFullError if code == "53100" else StoreError
        return kind(f"{self.shown}: {meaning} ({code}: {self._redact(str(error))})")

    def _redact(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _take_settings(url: str) -> tuple[str, dict[str, float]]:
    """Splits our own parameters off the query of a URL."""
    head, mark, query = url.partition("?")
    kept, given = [], {}
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if name.startswith("agl_"):
            name = name.removeprefix("agl_")
            try:
                given[_PARAMETERS[_PARAMETERS.index(name)]] = number = float(value)
                if not math.isfinite(number):
                    raise ValueError(value)
            except ValueError:
                known = ", ".join(f"agl_{known}" for known in _PARAMETERS)
                raise ConfigError(
                    f"agl_{name}={value} in the URL of the PostgreSQL store: use {known}, which take numbers"
                ) from None
        else:
            kept.append(part)
    return (head + mark + "&".join(kept)).rstrip("?"), given


def is_lost(connection: asyncpg.Connection, error: Exception) -> bool:
    """Whether an error means that the connection is lost, which says nothing about the statement."""
    return isinstance(error, _AWAY) or connection.is_closed()


def drop_if_lost(connection: asyncpg.Connection, error: Exception) -> None:
    """Terminates a connection that is lost, so that it is replaced."""
    if is_lost(connection, error):
        connection.terminate()


async def close(connection: asyncpg.Connection) -> None:
    """Closes a connection, even one that is lost."""
    try:
        await connection.close(timeout=2.0)
    except (*_AWAY, asyncpg.PostgresError, asyncpg.InterfaceError):  # it is already lost
        connection.terminate()


_MEANINGS: Final = {
    "25006": "the server is read-only (a standby?); nothing was written",
    "42501": "this user may not do that; grant it the right to create a schema, or to use the schema agl",
    "53100": "the disk is full; this write was not stored. Free some space and try again",
    "53200": "the server has no memory left; nothing was written, try again",
    "53300": "the server has no connection left; raise its max_connections, close other clients, or lower "
    "agl_connections in the URL of each store",
    "57014": "the server cancelled the statement, at its timeout (agl_statement_timeout_s in the URL) or by hand",
    "54000": "a record, or one of its ids, is larger than PostgreSQL takes; nothing was written",
}
