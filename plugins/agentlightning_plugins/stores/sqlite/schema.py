"""The SQLite file: opening, schema, migrations and free space."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError, StorageFullError, StoreError
from agentlightning.store.retention import next_slice
from agentlightning_plugins.stores.shared.clock import since_boot
from agentlightning_plugins.stores.shared.sql.parts import inflate
from agentlightning_plugins.stores.shared.sql.plan import TOO_LONG

APPLICATION_ID: Final = 0x41474C53
"""Marks our files in the header ("AGLS")."""
_SMALLEST_BYTES: Final = 512
"""The size of the smallest database; SQLite would mistake a smaller file for an empty one and overwrite it."""

_KEPT_PAGES: Final = 1024
"""Free pages that stay in the file, for the next records: 4 MiB."""
_STEP_PAGES: Final = 256
"""Number of pages that one step returns; writes wait a few milliseconds for it."""

# Columns have no type, because a typed column converts the values it is compared with: TEXT would find '1' for 1.
# Columns that refer to positions are INTEGER, as positions are; otherwise their indexes would not be used. Positions
# are AUTOINCREMENT: no number is used twice, so reading on after a position never misses a new record.
MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        """CREATE TABLE run (
            position INTEGER PRIMARY KEY AUTOINCREMENT, run_id NOT NULL UNIQUE, revision NOT NULL, record NOT NULL
        )""",
        """CREATE TABLE rollout (
            position INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id NOT NULL UNIQUE, run_id NOT NULL, status NOT NULL,
            start_time NOT NULL, end_time, task_id, group_id, step, priority NOT NULL, queue_position INTEGER,
            mode, resources_id, revision NOT NULL, record NOT NULL
        )""",
        "CREATE INDEX rollout_run ON rollout (run_id, position, mode, resources_id)",
        "CREATE INDEX rollout_status ON rollout (run_id, status)",
        """CREATE INDEX rollout_queue ON rollout (run_id, priority DESC, queue_position)
            WHERE queue_position IS NOT NULL""",
        "CREATE INDEX rollout_start ON rollout (run_id, start_time)",
        "CREATE INDEX rollout_end ON rollout (run_id, end_time)",
        # A task may have many rollouts: they are counted, and filtered by status, without reading their rows.
        "CREATE INDEX rollout_task ON rollout (task_id, position, run_id, status) WHERE task_id IS NOT NULL",
        "CREATE INDEX rollout_group ON rollout (group_id) WHERE group_id IS NOT NULL",
        "CREATE INDEX rollout_step ON rollout (step) WHERE step IS NOT NULL",
        # Attempts refer to rollouts, and spans to attempts, by position: these indexes grow at their end only, so that
        # a write touches the same few pages however large the file is.
        """CREATE TABLE attempt (
            position INTEGER PRIMARY KEY AUTOINCREMENT, rollout INTEGER NOT NULL, attempt_id NOT NULL,
            sequence_id NOT NULL, status, live, worker_id, last_heartbeat_time, last_span NOT NULL DEFAULT 0,
            revision NOT NULL, record NOT NULL, UNIQUE (rollout, attempt_id)
        )""",
        "CREATE INDEX attempt_live ON attempt (live, worker_id) WHERE live = 1",
        """CREATE TABLE span (
            position INTEGER PRIMARY KEY AUTOINCREMENT, attempt INTEGER NOT NULL, span_id NOT NULL,
            sequence_id NOT NULL, run_id NOT NULL, start_time, name, trace_id, parent_id,
            revision NOT NULL, record NOT NULL, UNIQUE (attempt, span_id)
        )""",
        # Spans of a run are found by what they have in this index, without reading the JSON. It grows at its end only.
        """CREATE INDEX span_run ON span (run_id, position, start_time, name, trace_id, parent_id, span_id)""",
        """CREATE TABLE resources (
            position INTEGER PRIMARY KEY AUTOINCREMENT, resources_id NOT NULL, version NOT NULL, run_id NOT NULL,
            revision NOT NULL, record NOT NULL, UNIQUE (resources_id, version)
        )""",
        "CREATE INDEX resources_run ON resources (run_id)",
        "CREATE INDEX resources_id ON resources (resources_id)",
        """CREATE TABLE worker (
            position INTEGER PRIMARY KEY AUTOINCREMENT, worker_id NOT NULL UNIQUE, revision NOT NULL, record NOT NULL
        )""",
        """CREATE TABLE metrics (
            position INTEGER PRIMARY KEY AUTOINCREMENT, run_id NOT NULL, step NOT NULL, revision NOT NULL,
            record NOT NULL, UNIQUE (run_id, step)
        )""",
        # The number of records of each kind; status is '' except for rollouts.
        """CREATE TABLE tally (
            name NOT NULL, run_id NOT NULL, status NOT NULL, number NOT NULL, PRIMARY KEY (name, run_id, status)
        ) WITHOUT ROWID""",
        # When the machine started, as the first process that opened the file since then saw it: if the clock is set,
        # leases and time limits go on.
        "CREATE TABLE clock (boot PRIMARY KEY, booted_at NOT NULL) WITHOUT ROWID",
        # The events of the last commits, for the other processes that have the file open.
        "CREATE TABLE event (position INTEGER PRIMARY KEY AUTOINCREMENT, origin NOT NULL, events NOT NULL)",
    ),
    (
        # What several spans of an attempt have in common; their records, deflated, refer to it by position.
        "CREATE TABLE part (position INTEGER PRIMARY KEY AUTOINCREMENT, attempt INTEGER NOT NULL, content NOT NULL)",
        "CREATE INDEX part_attempt ON part (attempt)",
    ),
)
"""The statements that upgrade the file to each version from the previous one. Released ones are never changed."""


def open_file(path: Path, busy_timeout_s: float) -> float:
    """Creates or migrates the file if needed. Only its owner may read a new file and its new folder.

    Returns:
        The Unix time at which the machine started, as all processes that open the file until the next start see it.

    Raises:
        ConfigError: the file is not a store, or is of a newer version; it is not changed.
        StoreError: the file cannot be opened or written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        size = path.stat().st_size
        if 0 < size < _SMALLEST_BYTES:
            raise _no_database(path)
        if size:
            # Through SQLite and not with open(): closing a file drops all of this process's locks on it, even those
            # of another connection.
            check = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=busy_timeout_s)
            try:
                _read_version(check, path)
            finally:
                check.close()
        connection = connect(path, busy_timeout_s)
        try:
            _migrate(connection, path, busy_timeout_s)
            return _read_clock(connection)
        finally:
            connection.close()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}; choose another place for the store") from error
    except sqlite3.Error as error:
        raise explain(error, path) from error


def _read_clock(connection: sqlite3.Connection) -> float:
    booted_at = time.time() - since_boot()
    with contextlib.suppress(OSError, sqlite3.OperationalError):  # no Linux, or the file is read-only
        boot = Path("/proc/sys/kernel/random/boot_id").read_text() if sys.platform == "linux" else ""
        if not boot:
            return booted_at
        read = "SELECT booted_at FROM clock WHERE boot = ?"
        if connection.execute(read, (boot,)).fetchone() is None:
            connection.execute("INSERT INTO clock VALUES (?, ?) ON CONFLICT DO NOTHING", (boot, booted_at))
        booted_at = connection.execute(read, (boot,)).fetchone()[0]
    return booted_at


def connect(path: Path, busy_timeout_s: float) -> sqlite3.Connection:
    """Opens a connection without implicit transactions, for one thread at a time."""
    connection = sqlite3.connect(
        path.absolute(), timeout=busy_timeout_s, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    try:
        connection.create_function("inflate", 1, lambda data: data and inflate(data), deterministic=True)
        connection.execute("PRAGMA synchronous = FULL")  # a commit returns when it is on disk, not in a cache
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA cache_size = -32768")  # KiB
        connection.execute("PRAGMA journal_size_limit = 67108864")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def explain(error: sqlite3.Error, path: Path) -> StoreError:
    """Converts an error of SQLite to the one that a caller of the store gets."""
    name = getattr(error, "sqlite_errorname", "")
    meaning = {
        "SQLITE_FULL": "the disk is full; this write was not stored. Free some space and try again",
        "SQLITE_READONLY": "the file or its folder is read-only; nothing was written",
        "SQLITE_BUSY": "other processes kept the file locked for too long; nothing was written, try again",
        "SQLITE_CANTOPEN": "the file cannot be opened; check that its folder exists and is writable",
        "SQLITE_TOOBIG": "a record is larger than SQLite allows (1 GB); nothing was written",
        "SQLITE_INTERRUPT": TOO_LONG,
        "SQLITE_CORRUPT": "the file is damaged; restore it from a copy",
        "SQLITE_NOTADB": "the file is not an SQLite database; choose another path",
    }.get("_".join(name.split("_")[:2]))
    kind = StorageFullError if name == "SQLITE_FULL" else StoreError
    return kind(f"{path}: {meaning or 'the database failed'} ({name or type(error).__name__}: {error})")


def _no_database(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not a store: it is not an SQLite database; choose another path")


def _read_version(connection: sqlite3.Connection, path: Path) -> int:
    """Returns the version of the file; 0 if it is empty.

    Raises:
        ConfigError: the file is not a store, or is of a newer version.
    """
    reads_alone = not connection.in_transaction
    try:
        if reads_alone:
            connection.execute("BEGIN")  # reads all three in one snapshot: another process may be creating the tables
        ((application_id,),) = connection.execute("PRAGMA application_id").fetchall()
        ((version,),) = connection.execute("PRAGMA user_version").fetchall()
        ((tables, foreign),) = connection.execute(
            "SELECT count(*), coalesce(sum(type IN ('view', 'trigger') OR sql LIKE '%VIRTUAL%'), 0) FROM sqlite_master"
        ).fetchall()
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "") != "SQLITE_NOTADB":
            raise
        raise _no_database(path) from error
    finally:
        if reads_alone and connection.in_transaction:
            connection.execute("ROLLBACK")
    if foreign:  # reading a view could run for ever, in a file that someone else made
        raise ConfigError(f"{path} has {foreign} views or triggers, which no store has; it is not opened")
    if application_id == 0 and version == 0 and tables == 0:
        return 0
    if application_id != APPLICATION_ID:
        raise ConfigError(f"{path} is the database of another program; choose another path for the store")
    if version > len(MIGRATIONS):
        raise ConfigError(
            f"{path} was written by a newer version of Lightning (its schema version is {version}, this one's "
            f"{len(MIGRATIONS)}); upgrade Lightning, or choose another path"
        )
    return int(version)


def _migrate(connection: sqlite3.Connection, path: Path, busy_timeout_s: float) -> None:
    deadline = time.monotonic() + busy_timeout_s
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # for a new file; it does not change existing files
    while True:
        try:
            # Readers do not wait for the writer, and a commit is one append and one fsync. The file keeps the mode.
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:  # changing the mode does not wait for its lock
            if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
    if _read_version(connection, path) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _read_version(connection, path)  # another process may have been faster
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def shrink(connection: sqlite3.Connection) -> None:
    """Returns some of the excess free pages to the file system."""
    free = connection.execute("PRAGMA freelist_count").fetchone()[0] - _KEPT_PAGES
    if free > 0:
        connection.executescript(f"PRAGMA incremental_vacuum({min(free, _STEP_PAGES)})")  # execute() does one page


def compact(path: Path, busy_timeout_s: float) -> Iterator[int]:
    """Returns all free pages to the file system, in slices of about ``SLICE_S``, and pauses as long after each.

    Yields the size of the file in bytes before the first slice, and after each.

    Raises:
        StoreError: the disk is full, or other processes keep the file locked.
    """
    pages = _STEP_PAGES
    try:
        with contextlib.closing(connect(path, busy_timeout_s)) as connection:
            yield _size(path)
            while connection.execute("PRAGMA freelist_count").fetchone()[0]:
                began = time.monotonic()
                connection.executescript(f"PRAGMA incremental_vacuum({pages})")
                # The file shrinks when its log is copied into it; a busy reader only delays that.
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                took_s = time.monotonic() - began
                pages = next_slice(pages, took_s)
                yield _size(path)
                time.sleep(took_s)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            yield _size(path)
    except sqlite3.Error as error:
        raise explain(error, path) from error


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, path.with_name(f"{path.name}-wal")) if each.exists())
