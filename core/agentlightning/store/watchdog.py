"""Ends attempts whose time has come, whether or not anybody calls the store.

Every process that opens a database itself watches over it; several watchdogs over one database are harmless, because
each end is a guarded commit that only one of them wins.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeVar

from agentlightning.lifecycle import Outcome, due_status, heard_of, lose_claim, move_attempt
from agentlightning.store.backend import Backend, Condition, Put, Query, Row, Write
from agentlightning.store.retention import Retention
from agentlightning.store.transition import Change, describe_work, revoked
from agentlightning.types import LIVE_ATTEMPT, Attempt, AttemptFailure, Record, Rollout, Worker

logger = logging.getLogger("agentlightning")
R = TypeVar("R", bound=Record)

_TIDY_EVERY_S: Final = 10.0
_LIVE = Condition("status", "in", tuple(sorted(LIVE_ATTEMPT)))


class Watchdog:
    """Enforces timeouts, unresponsiveness and leases of one database in a daemon thread of its own.

    It looks at live attempts only, at the next deadline or after ``interval_s``, whichever is sooner, so an end is at
    most ``interval_s`` late. The thread ends with ``stop`` or when the watchdog is no longer referenced.
    """

    def __init__(self, backend: Backend, lease_s: float, interval_s: float = 1.0) -> None:
        self._backend = backend
        self._lease_s = lease_s
        self._interval_s = interval_s
        self.retention: Retention | None = None
        self._tidied_at = -math.inf
        self._alarm = _Alarm()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._alarm.stop)

    def start(self) -> None:
        """Starts the thread; harmless when it runs, and after ``stop``."""
        with self._lock:
            if self._thread is None and not self._alarm.stopped:
                arguments = (weakref.ref(self), self._alarm, self._interval_s, self._lease_s)
                self._thread = threading.Thread(target=_watch, args=arguments, name="agl-watchdog", daemon=True)
                self._thread.start()

    def expect(self, rollout: Rollout, attempt: Attempt) -> None:
        """Looks in time for an attempt that has just begun, starting the thread if need be."""
        self.start()
        self._alarm.set(self._deadline(rollout, attempt, None))

    def stop(self) -> None:
        """Stops the thread and waits for the scan at work, if it is not called from it."""
        with self._lock:
            self._alarm.stop()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    async def tidy(self, now: float) -> None:
        """Deletes what the retention policy does not keep, every ten seconds at most."""
        if self.retention is not None and now - self._tidied_at >= max(self._interval_s, _TIDY_EVERY_S):
            self._tidied_at = now
            deleted = await self.retention.enforce(self._backend, now)
            if deleted:
                logger.info("%d rollouts were deleted: %s", deleted, self.retention)

    async def scan(self, now: float) -> float:
        """Ends what is due, and returns the instant at which the next live attempt will be (inf: none)."""
        rows = (await self._backend.select(Query(Attempt, (_LIVE,)))).rows
        if not rows:
            return math.inf
        rollouts = await self._by_id(Rollout, "rollout_id", {row.record.rollout_id for row in rows})
        workers = await self._by_id(Worker, "worker_id", {row.record.worker_id for row in rows if row.record.worker_id})
        next_deadline = math.inf
        ended: set[str] = set()
        for attempt in rows:
            rollout = rollouts.get(attempt.record.rollout_id)
            if rollout is None:  # deleted between the two reads
                continue
            worker = workers.get(attempt.record.worker_id or "")
            worker_seen = heard_of(None if worker is None else worker.record, attempt.record)
            outcome = self._judge(rollout.record, attempt.record, now, worker_seen)
            if outcome is None:
                next_deadline = min(next_deadline, self._deadline(rollout.record, attempt.record, worker_seen))
                continue
            change = Change(None)
            change.step(rollout, attempt, outcome, now)
            change.events.append(revoked(rollout.record, outcome.attempt, now))
            # A lost race means that somebody gave a sign of life or ended it: the next scan looks again.
            if await self._backend.commit(change.writes, change.guards, change.events):
                ended.add(attempt.record.attempt_id)
        await self._tell_workers(workers, [row.record for row in rows], ended, now)
        return next_deadline

    async def _tell_workers(
        self, workers: Mapping[str, Row[Worker]], attempts: Sequence[Attempt], ended: Collection[str], now: float
    ) -> None:
        """Writes what the ended attempts mean for their workers; one that is not heard of any more is unknown."""
        live: dict[str, list[Attempt]] = {
            attempt.worker_id: [] for attempt in attempts if attempt.worker_id and attempt.attempt_id in ended
        }
        for attempt in attempts:
            if attempt.worker_id in live and attempt.attempt_id not in ended:
                live[attempt.worker_id].append(attempt)
        puts: list[Write] = []
        for worker_id, others in live.items():
            if worker_id in workers:
                worker = describe_work(workers[worker_id].record, others, now)
                if now - (worker.last_heartbeat_time or 0.0) > self._lease_s:
                    worker = worker.model_copy(update={"status": "unknown"})
                puts.append(Put(worker))
        if puts:
            await self._backend.commit(puts)

    async def _by_id(self, kind: type[R], field: str, ids: Collection[str | None]) -> dict[str, Row[R]]:
        if not ids:
            return {}
        page = await self._backend.select(Query(kind, (Condition(field, "in", tuple(ids)),)))
        return {getattr(row.record, field): row for row in page.rows}

    def _judge(self, rollout: Rollout, attempt: Attempt, now: float, worker_seen: float | None) -> Outcome | None:
        """What a live attempt and its rollout become now; None while its time has not come.

        A live attempt is always its rollout's latest: whatever sends a rollout back or ends it ends its attempt.
        """
        config = rollout.config
        status = due_status(rollout, attempt, now, worker_seen=worker_seen, lease_s=None)
        if status is not None:
            error = AttemptFailure(type="Timeout", message=f"no result within timeout_seconds={config.timeout_seconds}")
            if status == "unresponsive":
                message = f"no span or heartbeat for unresponsive_seconds={config.unresponsive_seconds}"
                error = AttemptFailure(type="Unresponsive", message=message)
            return move_attempt(rollout, attempt, status, now, error=error, heard=False)
        if due_status(rollout, attempt, now, worker_seen=worker_seen, lease_s=self._lease_s) is None:
            return None
        worker = "" if attempt.worker_id is None else f" of worker {attempt.worker_id!r}"
        message = f"neither a span nor a heartbeat{worker} for the lease of {self._lease_s:g} s"
        return lose_claim(rollout, attempt, now, AttemptFailure(type="Unresponsive", message=message))

    def _deadline(self, rollout: Rollout, attempt: Attempt, worker_seen: float | None) -> float:
        """When a live attempt ends if nothing more is heard of it."""
        seen = attempt.last_heartbeat_time or attempt.start_time
        deadline = max(seen, worker_seen or 0.0) + self._lease_s
        if rollout.config.timeout_seconds is not None:
            deadline = min(deadline, attempt.start_time + rollout.config.timeout_seconds)
        if rollout.config.unresponsive_seconds is not None:
            deadline = min(deadline, seen + rollout.config.unresponsive_seconds)
        return deadline


class _Alarm:
    """Wakes the thread at an instant (Unix time) that may be brought forward while it sleeps."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._at = math.inf
        self.stopped = False

    def set(self, at: float) -> None:
        if at < self._at:
            with self._condition:
                self._at = min(self._at, at)
                self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self.stopped = True
            self._condition.notify()

    def wait(self, at: float) -> bool:
        """Sleeps until ``at`` or an earlier instant that was set since the last sleep; False: stop."""
        with self._condition:
            self._at = min(self._at, at)
            while not self.stopped and (wait_s := self._at - time.time()) > 0:
                self._condition.wait(wait_s)
            self._at = math.inf
            return not self.stopped


def _watch(reference: weakref.ref[Watchdog], alarm: _Alarm, interval_s: float, lease_s: float) -> None:
    """The thread: holds the watchdog while it scans only, so that an abandoned store can be collected."""
    loop = asyncio.new_event_loop()
    quiet_until = 0.0
    look_at = time.time() + interval_s
    try:
        while alarm.wait(look_at):
            watchdog = reference()
            if watchdog is None:
                return
            now = time.time()
            late_s = now - look_at
            look_at = now + interval_s
            if late_s > max(5.0, 2 * interval_s):
                # This machine or process was suspended, and the workers perhaps with it: let them be heard first.
                quiet_until = now + min(late_s, lease_s / 2)
            try:
                if now >= quiet_until:
                    look_at = min(
                        look_at, loop.run_until_complete(watchdog.scan(now)) + 0.001
                    )  # deadlines must have passed
                    loop.run_until_complete(watchdog.tidy(now))
            except Exception:  # isolation point: a database that is away for a while must not end the watch
                logger.exception("the watchdog could not do its round; it tries again in %g s", interval_s)
            del watchdog
    finally:
        loop.close()
