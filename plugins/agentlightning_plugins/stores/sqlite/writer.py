"""The thread that writes: concurrent writes share a transaction and an fsync."""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from agentlightning.errors import StoreError
from agentlightning.event import Event
from agentlightning.store.backend import Listener
from agentlightning_plugins.stores.sql.batch import Inbox, Item, settle, settle_here
from agentlightning_plugins.stores.sqlite.outbox import Outbox
from agentlightning_plugins.stores.sqlite.schema import connect, explain
from agentlightning_plugins.stores.sqlite.transaction import Known, Transaction

logger = logging.getLogger("agentlightning")
T = TypeVar("T")
Work: TypeAlias = Callable[[Transaction], Any]

MAX_BATCH: Final = 500
"""No more writes join a transaction of so many, so that the first of them need not wait for long."""
LOOK_EVERY_S: Final = 0.01
"""How often the writer looks for commits of other processes while somebody watches and it has nothing to do."""


class Writer:
    """Owns the only connection of this object that writes."""

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        self._path = path
        self._connection = connect(path, busy_timeout_s)
        self._connection.execute("PRAGMA wal_autocheckpoint = 4000")  # pages of 4 KiB
        self._outbox = Outbox(self._connection)
        self._known = Known()
        self._items: queue.SimpleQueue[list[Item[Work]]] = queue.SimpleQueue()
        self._inbox: Inbox[Work] = Inbox(self._deliver)
        self._lock = threading.Lock()
        self._stopped = False
        self.listeners: tuple[Listener, ...] = ()
        self.transactions = 0
        """How many were committed."""
        self._thread = threading.Thread(target=self._run, name="agl-sqlite-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Transaction], T]) -> asyncio.Future[T]:
        """Has the thread do this work in its next transaction; the result is there once that is durable."""
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
        with self._lock:
            self.listeners += (listener,)
        self._items.put([])  # from now on it looks for commits of others

        def stop() -> None:
            with self._lock:
                self.listeners = tuple(other for other in self.listeners if other is not listener)

        return stop

    def stop(self) -> None:
        """Ends the thread when it has done what was submitted; waits for that."""
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
                elif self.listeners:
                    self._look()
        finally:
            self._connection.close()

    def _take(self) -> list[Item[Work]]:
        """Waits for work, or until it is time to look for the work of others."""
        batch: list[Item[Work]] = []
        try:
            batch += self._items.get(timeout=LOOK_EVERY_S if self.listeners else None)
            while len(batch) < MAX_BATCH:
                batch += self._items.get_nowait()
        except queue.Empty:
            pass
        return batch

    def _write(self, batch: Sequence[Item[Work]]) -> None:
        """Does all of it in one transaction; if that fails, each in one of its own, so that only the culprit fails."""
        try:
            events = self._try(batch)
        except Exception as error:  # isolation point: whatever it is, this thread goes on and every caller is told
            if len(batch) > 1 and not _concerns_all(error):
                for item in batch:
                    self._write([item])
                return
            for item in batch:
                item.error = explain(error, self._path) if isinstance(error, sqlite3.Error) else error
            settle(batch)
            return
        if events:
            self._tell([events])
        settle(batch)

    def _try(self, batch: Sequence[Item[Work]]) -> Sequence[Event]:
        """Commits a batch, or nothing; returns what the watchers must hear of it."""
        connection = self._connection
        # IMMEDIATE takes the lock that writers share before the first read. A transaction that begins by reading and
        # finds another process writing can neither wait (its snapshot is old by then) nor go on: it would fail.
        connection.execute("BEGIN IMMEDIATE")
        try:
            heard = self._outbox.read()
            if self._outbox.has_moved:
                self._known.forget()
            self._tell(heard)  # what others did before us, before what we do
            self._known.shrink()
            transaction = Transaction(connection, self._known)
            for item in batch:
                item.error = None
                before = connection.total_changes
                try:
                    item.result = item.work(transaction)
                except sqlite3.Error:
                    raise
                except Exception as error:  # isolation point: one caller's failure is not the others'
                    if connection.total_changes != before:
                        raise  # the transaction is of no use to the others
                    item.error = error
            position = transaction.finish(self._outbox.origin)
            connection.execute("COMMIT")
        except BaseException:
            self._known.forget()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.transactions += 1
        if position is not None:
            self._outbox.skip(position)
        return transaction.events

    def _look(self) -> None:
        try:
            heard = self._outbox.read()
            if self._outbox.has_moved:
                self._known.forget()
            self._tell(heard)
        except Exception as error:  # isolation point: a file that is away for a while must not end the thread
            cause = explain(error, self._path) if isinstance(error, sqlite3.Error) else error
            logger.warning("cannot look for events of other processes, and tries again: %s", cause)
            time.sleep(1.0)

    def _tell(self, news: Sequence[Sequence[Event]]) -> None:
        for events in news:
            for listener in self.listeners:
                try:
                    listener(events)
                except Exception:  # isolation point: one watcher must not fail the writer or other watchers
                    logger.exception("a watcher of the store %s failed", self._path)


def _concerns_all(error: Exception) -> bool:
    """Whether every other write would fail in the same way, after as long a wait."""
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_READONLY", "SQLITE_CANTOPEN"))
