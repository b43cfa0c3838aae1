"""The watchdog: ends overdue attempts and deletes old rollouts in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from agentlightning.errors import StoreError
from agentlightning.records import Attempt, Record, Rollout, Worker
from agentlightning.store.backend import Condition, Query, Row
from agentlightning.store.engine.change import Change
from agentlightning.store.engine.database import LIVE, Database
from agentlightning.store.lifecycle import end_overdue, last_heartbeat
from agentlightning.store.retention import RetentionPolicy, delete_old_workers

logger = logging.getLogger("agentlightning")
R = TypeVar("R", bound=Record)
_Work: TypeAlias = "Callable[[Watchdog, float], Coroutine[Any, Any, None]]"
"""The work of a thread in each interval, given the time."""

_RETENTION_INTERVAL_S: Final = 10.0
_WORKERS_INTERVAL_S: Final = 3600.0


class Watchdog:
    """Enforces timeouts, unresponsiveness and leases of one database, in a daemon thread.

    It reads the live attempts every ``interval_s``, so an attempt ends at most that late. Another thread deletes what a
    retention policy does not keep. Several processes may watch one database, because each end is a guarded commit. The
    threads end with ``stop`` or if the watchdog is collected. With ``interval_s=None`` they never start.
    """

    def __init__(self, database: Database, lease_s: float, interval_s: float | None) -> None:
        self.database = database
        self.interval_s = interval_s
        self._lease_s = lease_s
        self.retention: RetentionPolicy | None = None
        self._retained_at = -math.inf
        self._workers_deleted_at = -math.inf
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._stopped = threading.Event()
        self._damaged: set[str] = set()
        """Ids of the attempts whose records were reported as damaged."""
        weakref.finalize(self, self._stopped.set)

    def start(self) -> None:
        """Starts the threads that do not run yet; does nothing after ``stop``."""
        works: dict[str, Sequence[_Work]] = {"agl-watchdog": (Watchdog.scan, Watchdog.delete_workers)}
        if self.retention is not None:
            works["agl-retention"] = (Watchdog.retain,)
        with self._lock:
            for name, work in works.items():
                if self.interval_s is not None and name not in self._threads and not self._stopped.is_set():
                    arguments = (weakref.ref(self), work, self._stopped, self.interval_s, self._lease_s)
                    thread = threading.Thread(target=_run, args=arguments, name=name, daemon=True)
                    self._threads[name] = thread
                    thread.start()

    def stop(self) -> None:
        """Stops the threads and waits for what they do, unless called from one of them."""
        with self._lock:
            self._stopped.set()
        for thread in self._threads.values():
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    async def scan(self, now: float) -> None:
        """Ends the attempts that are overdue."""
        attempts = await self.database.rows(Query(Attempt, (LIVE,)))
        if not attempts:
            return
        rollouts = await self._by_id(Rollout, "rollout_id", [row.record.rollout_id for row in attempts])
        worker_ids = [row.record.worker_id for row in attempts if row.record.worker_id is not None]
        workers = await self._by_id(Worker, "worker_id", worker_ids)
        for attempt in attempts:
            rollout = rollouts.get(attempt.record.rollout_id)
            if rollout is None:  # deleted between the two reads
                continue
            try:
                await self._check(rollout, attempt, workers.get(attempt.record.worker_id or ""), now)
            except (StoreError, OSError):  # the database failed, for all attempts
                raise
            except Exception as error:  # isolation point: a damaged record must not stop the checks of others
                if attempt.record.attempt_id not in self._damaged:
                    self._damaged.add(attempt.record.attempt_id)
                    logger.error(
                        "the watchdog cannot check attempt %s of rollout %s, whose record is damaged (%s: %s); "
                        "cancel the rollout or retry it",
                        *(attempt.record.attempt_id, rollout.record.rollout_id, type(error).__name__, error),
                    )

    async def _check(
        self, rollout: Row[Rollout], attempt: Row[Attempt], worker: Row[Worker] | None, now: float
    ) -> None:
        outcome = end_overdue(
            rollout.record,
            attempt.record,
            now,
            worker_seen=last_heartbeat(worker.record if worker is not None else None, attempt.record),
            lease_s=self._lease_s,
            is_worker_alive=worker is not None and now - (worker.record.last_heartbeat_time or 0) <= self._lease_s,
            n_lost=await self.database.count_lost_claims(attempt.record),
        )
        if outcome is not None:
            change = Change(None)
            change.revoke(rollout, attempt, outcome, now)
            await self.database.try_commit(change)  # if it has changed since the read, the next scan reads it again

    async def delete_workers(self, now: float) -> None:
        """Deletes old workers, every hour."""
        if now - self._workers_deleted_at >= _WORKERS_INTERVAL_S:
            self._workers_deleted_at = now
            await delete_old_workers(self.database.backend, now)

    async def retain(self, now: float) -> None:
        """Enforces the retention policy at most every ten seconds, until ``stop``; logs the progress as often."""
        if self.retention is None or now - self._retained_at < _RETENTION_INTERVAL_S:
            return
        self._retained_at = reported_at = now
        deleted, policy = 0, self.retention
        async with contextlib.aclosing(policy(self.database.backend, now)) as slices:
            async for number in slices:
                deleted += number
                if self._stopped.is_set():
                    break
                if self.database.now() - reported_at >= _RETENTION_INTERVAL_S:
                    reported_at = self.database.now()
                    logger.info("%d rollouts were deleted so far: %s", deleted, policy)
        if deleted:
            logger.info("%d rollouts were deleted: %s", deleted, policy)

    async def _by_id(self, kind: type[R], field: str, ids: Sequence[str]) -> dict[str, Row[R]]:
        if not ids:
            return {}
        rows = await self.database.rows(Query(kind, (Condition(field, "in", tuple(set(ids))),)))
        return {getattr(row.record, field): row for row in rows}


def _run(
    reference: weakref.ref[Watchdog],
    works: Sequence[_Work],
    stopped: threading.Event,
    interval_s: float,
    lease_s: float,
) -> None:
    """Runs a thread, which references the watchdog only during a scan, so that an abandoned store is collected."""
    with asyncio.Runner() as runner:
        scan_after = 0.0
        next_scan = math.inf
        while not stopped.wait(interval_s):
            watchdog = reference()
            if watchdog is None:
                return
            now = watchdog.database.now()
            late_s, next_scan = now - next_scan, now + interval_s
            if late_s > max(5.0, 2 * interval_s):
                # The machine or process was suspended, and perhaps the workers with it: wait for their heartbeats.
                scan_after = now + min(late_s, lease_s / 2)
            try:
                for work in works if now >= scan_after else ():
                    runner.run(work(watchdog, now))
            except (StoreError, OSError) as error:  # the backend reports an outage by itself
                logger.info("the watchdog could not scan the store; it tries again in %g s: %s", interval_s, error)
            except Exception as error:  # isolation point: a scan that fails must not end the thread
                if "cannot schedule new futures after" in str(error):  # the process ends: its executors are shut down
                    return
                logger.exception("the watchdog could not scan the store; it tries again in %g s", interval_s)
            del watchdog
