"""The schema of the PostgreSQL database and its migrations."""

from __future__ import annotations

from typing import Final

import asyncpg

from agentlightning.errors import ConfigError

SCHEMA: Final = "agl"
"""The PostgreSQL schema of all our tables; the database can have other schemas."""
_MIGRATING: Final = 0x41474C01
"""The advisory lock of a migration."""
_MIGRATION_TIMEOUT_S: Final = 86_400.0
"""How long a statement of a migration may take: it may rewrite a large table, or wait for another process."""


# Text is compared byte by byte (COLLATE "C"), which is the order of Python's strings. Attempts refer to rollouts, and
# spans to attempts, by position: their indexes grow at the end only. Rows that are updated often have free space
# next to them (fillfactor), so that an update touches no index.
_FIRST: Final = (
    """CREATE TABLE agl.rollout (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        rollout_id text COLLATE "C" NOT NULL,
        run_id text COLLATE "C" NOT NULL,
        status text COLLATE "C" NOT NULL,
        start_time double precision NOT NULL,
        end_time double precision,
        task_id text COLLATE "C", group_id text COLLATE "C", step text COLLATE "C",
        priority bigint NOT NULL,
        queue_position bigint,
        mode text COLLATE "C", resources_id text COLLATE "C",
        revision bigint NOT NULL,
        record text NOT NULL
    )""",
    # Searches by time or a part of the id use indexes that hold all they need, so that no JSON is read.
    "CREATE UNIQUE INDEX rollout_id ON agl.rollout (rollout_id) INCLUDE (run_id, position)",
    "CREATE INDEX rollout_start ON agl.rollout (run_id, start_time NULLS FIRST, position)",
    "CREATE INDEX rollout_end ON agl.rollout (run_id, end_time NULLS FIRST, position)",
    "CREATE INDEX rollout_run ON agl.rollout (run_id, position) INCLUDE (mode, resources_id)",
    "CREATE INDEX rollout_status ON agl.rollout (run_id, status, position)",
    """CREATE INDEX rollout_queue ON agl.rollout (run_id, priority DESC, queue_position)
        WHERE queue_position IS NOT NULL""",
    "CREATE INDEX rollout_task ON agl.rollout (task_id, position) WHERE task_id IS NOT NULL",
    "CREATE INDEX rollout_group ON agl.rollout (group_id, position) WHERE group_id IS NOT NULL",
    "CREATE INDEX rollout_step ON agl.rollout (step, position) WHERE step IS NOT NULL",
    "CREATE SEQUENCE agl.queue",
    """CREATE TABLE agl.attempt (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        rollout bigint NOT NULL,
        attempt_id text COLLATE "C" NOT NULL,
        sequence_id bigint NOT NULL,
        status text COLLATE "C" NOT NULL,
        live boolean NOT NULL,
        worker_id text COLLATE "C",
        last_heartbeat_time double precision,
        last_span bigint NOT NULL DEFAULT 0,
        revision bigint NOT NULL,
        record text NOT NULL,
        UNIQUE (rollout, attempt_id)
    ) WITH (fillfactor = 70)""",
    "CREATE INDEX attempt_live ON agl.attempt (worker_id, position) WHERE live",
    """CREATE TABLE agl.span (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        attempt bigint NOT NULL,
        span_id text COLLATE "C" NOT NULL,
        sequence_id bigint NOT NULL,
        run_id text COLLATE "C" NOT NULL,
        start_time double precision,
        name text COLLATE "C", trace_id text COLLATE "C", parent_id text COLLATE "C",
        xid bigint NOT NULL,
        revision bigint NOT NULL,
        record text NOT NULL,
        UNIQUE (attempt, span_id)
    )""",
    # Polls find the spans of new transactions.
    "CREATE INDEX span_xid ON agl.span (run_id, xid, position)",
    # Spans of a run are found by what they have in this index, without reading the JSON. It grows at its end only.
    """CREATE INDEX span_run ON agl.span (run_id, position)
        INCLUDE (start_time, name, trace_id, parent_id, span_id)""",
    """CREATE TABLE agl.run (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, run_id text COLLATE "C" NOT NULL UNIQUE,
        revision bigint NOT NULL, record text NOT NULL
    )""",
    """CREATE TABLE agl.resources (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, resources_id text COLLATE "C" NOT NULL,
        version bigint NOT NULL, run_id text COLLATE "C" NOT NULL, revision bigint NOT NULL, record text NOT NULL,
        UNIQUE (resources_id, version)
    )""",
    "CREATE INDEX resources_id ON agl.resources (resources_id, position)",
    "CREATE INDEX resources_run ON agl.resources (run_id, position)",
    """CREATE TABLE agl.worker (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, worker_id text COLLATE "C" NOT NULL UNIQUE,
        revision bigint NOT NULL, record text NOT NULL
    ) WITH (fillfactor = 70)""",
    """CREATE TABLE agl.metrics (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, run_id text COLLATE "C" NOT NULL,
        step bigint NOT NULL, revision bigint NOT NULL, record text NOT NULL, UNIQUE (run_id, step)
    )""",
    # The number of records of each kind; status is '' except for rollouts. Each process counts in its own rows (slot),
    # so that no two wait for each other.
    """CREATE TABLE agl.tally (
        name text COLLATE "C" NOT NULL, run_id text COLLATE "C" NOT NULL, status text COLLATE "C" NOT NULL,
        number bigint NOT NULL, slot int NOT NULL DEFAULT 0, PRIMARY KEY (name, run_id, status, slot)
    ) WITH (fillfactor = 20)""",
    # The events of the last commits, for the other processes that have the database open, with their transactions:
    # readers find what was committed since they last looked.
    """CREATE TABLE agl.event (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, xid bigint NOT NULL, origin bigint NOT NULL,
        events text NOT NULL
    )""",
    "CREATE INDEX event_xid ON agl.event (xid)",
    # The last transaction that each process committed, for a process that lost the connection before the answer.
    """CREATE TABLE agl.writer (
        origin bigint PRIMARY KEY, number bigint NOT NULL, seen timestamptz NOT NULL DEFAULT now()
    ) WITH (fillfactor = 20)""",
)
_PARTS: Final = (
    # What several spans of an attempt have in common; the record of a span that is a list refers to it by position.
    """CREATE TABLE agl.part (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, attempt bigint NOT NULL, content text NOT NULL
    )""",
    "CREATE INDEX part_attempt ON agl.part (attempt)",
)
MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (_FIRST, _PARTS)
"""The statements that upgrade the schema to each version from the previous one."""
OLDEST_WRITER: Final = 2
"""The oldest version whose processes may write to the newest schema, so that servers can be upgraded in turn."""
MIGRATED: Final = "migrated"
"""The payload of the notification after a migration."""


async def migrate(connection: asyncpg.Connection, shown: str) -> None:
    """Creates or migrates the schema if needed.

    Args:
        connection: a connection to the database, outside a transaction.
        shown: the name of the database in messages.

    Raises:
        ConfigError: the schema ``agl`` belongs to another program or a newer version; it is not changed.
    """
    if await check_version(connection, shown) >= len(MIGRATIONS):
        return
    async with connection.transaction():
        await connection.execute("SET LOCAL statement_timeout = 0")
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATING, timeout=_MIGRATION_TIMEOUT_S)
        version = await check_version(connection, shown)  # another process may have been faster
        if version == 0:
            await connection.execute("CREATE SCHEMA agl")
            await connection.execute(
                "CREATE TABLE agl.schema_version AS SELECT 0 AS version, 0 AS oldest_writer, 0::bigint AS xid_offset"
            )
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                await connection.execute(statement, timeout=_MIGRATION_TIMEOUT_S)
        await connection.execute(
            "UPDATE agl.schema_version SET version = $1, oldest_writer = $2", len(MIGRATIONS), OLDEST_WRITER
        )
        await connection.execute("SELECT pg_notify('agl', $1)", MIGRATED)


async def check_version(connection: asyncpg.Connection, shown: str) -> int:
    """Returns the version of the schema; 0 if there is none.

    Raises:
        ConfigError: it belongs to another program, or to a newer version that this one cannot write to.
    """
    there, versioned = await connection.fetchrow(
        "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1), to_regclass('agl.schema_version') IS NOT NULL",
        SCHEMA,
    )
    if not there:
        return 0
    if not versioned:
        raise ConfigError(
            f"{shown} has a schema named {SCHEMA!r} that is not ours; choose another database for the store"
        )
    version: int
    version, oldest_writer = await connection.fetchrow("SELECT version, oldest_writer FROM agl.schema_version")
    if version > len(MIGRATIONS) and oldest_writer > len(MIGRATIONS):
        raise ConfigError(
            f"{shown} was written by a newer version of Lightning (its schema version is {version}, this one's "
            f"{len(MIGRATIONS)}); upgrade Lightning, or choose another database"
        )
    return version
