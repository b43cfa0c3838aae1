"""The thread that writes: concurrent writes share a transaction and an fsync."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from pydantic import ValidationError

from agentlightning.errors import StoreError
from agentlightning.event import Event
from agentlightning.store.backend import Listener
from agentlightning_plugins.stores.shared.clock import since_boot
from agentlightning_plugins.stores.shared.sql.batch import (
    CLOCKS_S,
    ENDED_SINCE,
    WAITING,
    Inbox,
    Item,
    make_missed_events,
    settle,
    settle_here,
)
from agentlightning_plugins.stores.shared.sql.document import decode_events
from agentlightning_plugins.stores.shared.watchers import Watchers
from agentlightning_plugins.stores.sqlite.schema import connect, explain, shrink
from agentlightning_plugins.stores.sqlite.transaction import Rows, Transaction

_NEW: Final = "SELECT position, origin, events FROM event WHERE position > ? ORDER BY position"
_NEWEST: Final = "SELECT coalesce(max(position), 0) FROM event"
_OLDEST: Final = "SELECT coalesce(min(position), 0) FROM event"


class EventReader:
    """Reads events of other processes, each once and in commit order, in the thread that owns the connection."""

    def __init__(self, connection: sqlite3.Connection, booted_at: float) -> None:
        self._booted_at = booted_at
        self.origin = int.from_bytes(os.urandom(7))
        """Distinguishes our events from other processes' events."""
        self._execute = connection.execute
        self._version = self._data_version()
        self.has_moved = False
        """Whether other processes had written at the last ``read``."""
        self._position: int = self._execute(_NEWEST).fetchone()[0]
        self._up_to_date_at = self._booted_at + since_boot()

    def read(self) -> list[list[Event]]:
        """Returns the events that other processes committed since the last call, a list for each transaction.

        If there are none, the call costs one read of shared memory.
        """
        version = self._data_version()
        self.has_moved = version != self._version
        if not self.has_moved:
            return []
        commits: list[list[Event]] = []
        oldest = self._execute(_OLDEST).fetchone()[0]
        if oldest > self._position + 1:  # this process was stopped for so long that some are deleted
            since = self._up_to_date_at - CLOCKS_S
            ended = self._execute(ENDED_SINCE.format("", "?"), (since,))
            commits.append(make_missed_events(self._execute(WAITING.format("")), ended))
        for position, origin, text in self._execute(_NEW, (self._position,)).fetchall():
            if origin != self.origin:
                try:
                    commits.append(decode_events(text))
                except ValidationError:  # of a newer version, say; it must not keep this process from writing
                    logger.exception("an event of another process cannot be read and is skipped")
            self._position = position
        self._version = version
        self._up_to_date_at = self._booted_at + since_boot()
        return commits

    def skip(self, position: int) -> None:
        """Skips this process's own events; all earlier events were read in the same transaction."""
        self._position = position

    def _data_version(self) -> int:
        """Returns a number that changes with every commit of another connection, but not with ours."""
        version: int = self._execute("PRAGMA data_version").fetchone()[0]
        return version


logger = logging.getLogger("agentlightning")
T = TypeVar("T")
Work: TypeAlias = Callable[[Transaction], Any]

MAX_BATCH: Final = 500
"""Maximum number of writes in a transaction, so that the first of them does not wait for long."""
_FAIL_ALL: Final = ("SQLITE_BUSY", "SQLITE_READONLY", "SQLITE_CANTOPEN")
"""Errors after which every other write would fail in the same way, after the same wait."""
_SHRINK_EVERY: Final = 32
"""Number of transactions between two checks for free pages."""
LOOK_EVERY_S: Final = 0.01
"""How often an idle writer with watchers looks for commits of other processes."""


class Writer:
    """Writes over the backend's only writing connection, in a thread."""

    def __init__(self, path: Path, busy_timeout_s: float, booted_at: float) -> None:
        self._path = path
        self._connection = connect(path, busy_timeout_s)
        self._connection.execute("PRAGMA wal_autocheckpoint = 4000")  # pages of 4 KiB
        self._events = EventReader(self._connection, booted_at)
        self._rows = Rows(self._connection)
        self._items: queue.SimpleQueue[list[Item[Work]]] = queue.SimpleQueue()
        self._inbox: Inbox[Work] = Inbox(self._deliver)
        self._lock = threading.Lock()
        self._stopped = False
        self._watchers = Watchers(str(path))
        self.transactions = 0
        """How many transactions were committed."""
        self._thread = threading.Thread(target=self._run, name="agl-sqlite-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Transaction], T]) -> asyncio.Future[T]:
        """Does the work in the thread's next transaction; the result is set once that is durable."""
        return self._inbox.submit(work)

    def _deliver(self, items: list[Item[Work]]) -> None:
        with self._lock:
            if not self._stopped:
                self._items.put(items)
                return
        for item in items:
            item.error = StoreError(f"{self._path} is closed")
        settle_here(items)

    def watch(self, listener: Listener) -> Callable[[], None]:
        remove = self._watchers.add(listener)
        self._items.put([])  # from now on, the thread looks for commits of others
        return remove

    def stop(self) -> None:
        """Ends the thread when all submitted work is done, and waits for that."""
        with self._lock:
            self._stopped = True
            self._items.put([])
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not (self._stopped and self._items.empty()):
                batch = self._take()
                if batch:
                    self._write(batch)
                elif self._watchers.listeners:
                    self._look()
        finally:
            self._connection.close()

    def _take(self) -> list[Item[Work]]:
        """Waits for work, or until it is time to look for commits of other processes."""
        batch: list[Item[Work]] = []
        try:
            batch += self._items.get(timeout=LOOK_EVERY_S if self._watchers.listeners else None)
            while len(batch) < MAX_BATCH:
                batch += self._items.get_nowait()
        except queue.Empty:
            pass
        return batch

    def _write(self, batch: Sequence[Item[Work]]) -> None:
        """Does the work in one transaction; if that fails, each item in its own, so that only the culprit fails."""
        try:
            events = self._try(batch)
        except Exception as error:  # isolation point: every caller gets the error and this thread goes on
            if len(batch) > 1 and not getattr(error, "sqlite_errorname", "").startswith(_FAIL_ALL):
                for item in batch:
                    self._write([item])
                return
            for item in batch:
                item.error = explain(error, self._path) if isinstance(error, sqlite3.Error) else error
            settle(batch)
            return
        if events:
            self._watchers.publish(events)
        settle(batch)
        if self.transactions % _SHRINK_EVERY == 0:
            with contextlib.suppress(sqlite3.Error):  # another process is writing: the next time will do
                shrink(self._connection)

    def _try(self, batch: Sequence[Item[Work]]) -> Sequence[Event]:
        """Commits a batch completely or not at all; returns its events."""
        connection = self._connection
        # IMMEDIATE takes the writers' lock before the first read. A transaction that begins by reading and then finds
        # another process writing can neither wait (its snapshot would be old) nor go on: it would fail.
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._publish_others()  # before our events, which come after them
            transaction = Transaction(connection, self._rows)
            for item in batch:
                item.error = None
                before = transaction.changes.steps
                try:
                    item.result = item.work(transaction)
                except sqlite3.Error:
                    raise
                except Exception as error:  # isolation point: one caller's failure must not fail another call
                    if transaction.changes.steps != before:
                        raise  # no other call can use the transaction
                    item.error = error
            position = transaction.finish(self._events.origin)
            connection.execute("COMMIT")
        except BaseException:
            self._rows.forget()
            self._rows.parts.forget()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.transactions += 1
        if position is not None:
            self._events.skip(position)
        return transaction.changes.events

    def _publish_others(self) -> None:
        """Publishes what other processes committed since the last time."""
        commits = self._events.read()
        if self._events.has_moved:
            self._rows.forget()
        for events in commits:
            self._watchers.publish(events)

    def _look(self) -> None:
        try:
            self._publish_others()
        except Exception as error:  # isolation point: a file that is away for a while must not end the thread
            cause = explain(error, self._path) if isinstance(error, sqlite3.Error) else error
            logger.warning("cannot look for events of other processes; trying again: %s", cause)
            time.sleep(1.0)
