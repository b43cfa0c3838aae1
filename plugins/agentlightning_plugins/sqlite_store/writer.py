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
from typing import Any, Final, Generic, TypeVar

from agentlightning.errors import StoreError
from agentlightning.event import Event
from agentlightning.store.backend import Listener
from agentlightning_plugins.sqlite_store.outbox import Outbox
from agentlightning_plugins.sqlite_store.schema import connect, explain
from agentlightning_plugins.sqlite_store.transaction import Transaction

logger = logging.getLogger("agentlightning")
T = TypeVar("T")

MAX_BATCH: Final = 500
"""How many writes share a transaction at most, so that the first of them need not wait for long."""
LOOK_EVERY_S: Final = 0.01
"""How often the writer looks for commits of other processes while somebody watches and it has nothing to do."""


class Item(Generic[T]):
    """One caller's part of a transaction, and where its outcome goes."""

    __slots__ = ("error", "future", "loop", "result", "work")

    def __init__(self, work: Callable[[Transaction], T]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()
        self.result: T
        self.error: BaseException | None = None

    def settle(self) -> None:
        """Tells the caller, in its loop."""
        if self.future.done():  # cancelled: the write stands, nobody asks any more
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Writer:
    """Owns the only connection of this object that writes."""

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        self._path = path
        self._connection = connect(path, busy_timeout_s)
        self._connection.execute("PRAGMA wal_autocheckpoint = 4000")  # pages of 4 KiB
        self._outbox = Outbox(self._connection)
        self._items: queue.SimpleQueue[Item[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self.listeners: tuple[Listener, ...] = ()
        self.transactions = 0
        """How many were committed."""
        self._thread = threading.Thread(target=self._run, name="agl-sqlite-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Transaction], T]) -> asyncio.Future[T]:
        """Has the thread do this work in its next transaction; the result is there once that is durable.

        Raises:
            StoreError: the store is closed.
        """
        item = Item(work)
        with self._lock:
            if self._stopped:
                raise StoreError(f"{self._path} is closed")
            self._items.put(item)
        return item.future

    def watch(self, listener: Listener) -> Callable[[], None]:
        with self._lock:
            self.listeners += (listener,)
        self._items.put(None)  # from now on it looks for commits of others

        def stop() -> None:
            with self._lock:
                self.listeners = tuple(other for other in self.listeners if other is not listener)

        return stop

    def stop(self) -> None:
        """Ends the thread when it has done what was submitted; waits for that."""
        with self._lock:
            self._stopped = True
            self._items.put(None)
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

    def _take(self) -> list[Item[Any]]:
        """Waits for work, or until it is time to look for the work of others."""
        batch: list[Item[Any]] = []
        try:
            item = self._items.get(timeout=LOOK_EVERY_S if self.listeners else None)
            while True:
                if item is not None:
                    batch.append(item)
                if len(batch) == MAX_BATCH:
                    return batch
                item = self._items.get_nowait()
        except queue.Empty:
            return batch

    def _write(self, batch: Sequence[Item[Any]]) -> None:
        """Does all of it in one transaction; if that fails, each in one of its own, so that only the culprit fails."""
        try:
            events = self._try(batch)
        except sqlite3.Error as error:
            if len(batch) > 1 and not _concerns_all(error):
                for item in batch:
                    self._write([item])
                return
            cause = explain(error, self._path)
            for item in batch:
                item.error = cause if len(batch) == 1 else StoreError(str(cause))
            return _settle(batch)
        except _Spoilt as spoilt:
            if len(batch) > 1:
                for item in batch:
                    self._write([item])
                return
            batch[0].error = spoilt.error
            return _settle(batch)
        if events:
            self._tell([events])
        _settle(batch)

    def _try(self, batch: Sequence[Item[Any]]) -> Sequence[Event]:
        """Commits a batch, or nothing; returns what the watchers must hear of it."""
        connection = self._connection
        # IMMEDIATE takes the lock that writers share before the first read. A transaction that begins by reading and
        # finds another process writing can neither wait (its snapshot is old by then) nor go on: it would fail.
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._tell(self._outbox.read())  # what others did before us, before what we do
            transaction = Transaction(connection)
            for item in batch:
                item.error = None
                before = connection.total_changes
                try:
                    item.result = item.work(transaction)
                except sqlite3.Error:
                    raise
                except Exception as error:  # isolation point: one caller's failure is not the others'
                    if connection.total_changes != before:
                        raise _Spoilt(error) from error
                    item.error = error
            position = transaction.finish(self._outbox.origin)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.transactions += 1
        if position is not None:
            self._outbox.skip(position)
        return transaction.events

    def _look(self) -> None:
        try:
            self._tell(self._outbox.read())
        except sqlite3.Error as error:
            logger.warning("%s; it is tried again", explain(error, self._path))
            time.sleep(1.0)

    def _tell(self, news: Sequence[Sequence[Event]]) -> None:
        for events in news:
            for listener in self.listeners:
                try:
                    listener(events)
                except Exception:  # isolation point: one watcher must not fail the writer or other watchers
                    logger.exception("a watcher of the store %s failed", self._path)


class _Spoilt(Exception):
    """A caller's work failed when it had written already: the transaction is of no use."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _concerns_all(error: sqlite3.Error) -> bool:
    """Whether every other write would fail in the same way, after as long a wait."""
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_READONLY", "SQLITE_CANTOPEN"))


def _settle(batch: Sequence[Item[Any]]) -> None:
    """Wakes the callers: one call for each event loop, since each wakes a thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Item[Any]]] = {}
    for item in batch:
        by_loop.setdefault(item.loop, []).append(item)
    for loop, items in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle_all, items)
        except RuntimeError:  # the loop is closed: its callers are gone
            continue


def _settle_all(items: Sequence[Item[Any]]) -> None:
    for item in items:
        item.settle()
