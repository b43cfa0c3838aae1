"""What every part of the engine stands on: lookups, and commits that are repeated when a race is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.store.backend import KEYS, Backend, Condition, Put, Query, Row
from agentlightning.store.protocol import LightningStore
from agentlightning.store.transition import Change, describe_work
from agentlightning.store.waiting import Waiters
from agentlightning.store.watchdog import Watchdog
from agentlightning.types import LIVE_ATTEMPT, Attempt, AttemptedRollout, Record, Rollout, Worker

T = TypeVar("T")
R = TypeVar("R", bound=Record)

_LIVE = tuple(sorted(LIVE_ATTEMPT))
_MAX_HELD = 10_000

MAX_RACES = 50
"""How often a commit is tried before giving up. Each failure means that somebody else's succeeded."""


class Database:
    """One open database: what all views of a store share."""

    def __init__(self, backend: Backend, lease_s: float, watchdog_interval_s: float | None) -> None:
        self.backend = backend
        self.lease_s = lease_s
        self.opened_at = time.monotonic()
        self.waiters = Waiters()
        self.watchdog = Watchdog(backend, lease_s, watchdog_interval_s) if watchdog_interval_s is not None else None
        self.begun: set[tuple[str, str]] = set()
        """Attempts known to have left ``preparing``, which no attempt enters again: spares a lookup for each span."""
        self.held: OrderedDict[tuple[str, str], tuple[Row[Rollout], Row[Attempt]]] = OrderedDict()
        """Live attempts with their rollouts, as this process wrote them last. Others may have written since: a commit
        that is planned from these is guarded by their revisions, and planned again from fresh ones if it fails."""
        self.background: set[asyncio.Task[None]] = set()
        """Tasks that outlive their caller; held here because a loop holds tasks weakly."""
        self.stop_watching = backend.watch(self.waiters.publish)

    def hold(self, rollout: Row[Rollout], attempt: Row[Attempt]) -> None:
        """Remembers an attempt that was just written, while it is live."""
        if attempt.record.status in LIVE_ATTEMPT:
            self.held[rollout.record.rollout_id, attempt.record.attempt_id] = rollout, attempt
            while len(self.held) > _MAX_HELD:
                with contextlib.suppress(KeyError):  # another thread was faster
                    self.held.popitem(last=False)

    def expect(self, begun: Iterable[AttemptedRollout]) -> None:
        """Has the watchdog look after attempts that have just begun."""
        if self.watchdog is not None:
            for rollout in begun:
                self.watchdog.expect(rollout, rollout.attempt)

    def mark_begun(self, attempt: tuple[str, str]) -> None:
        if len(self.begun) >= 100_000:
            self.begun.clear()
        self.begun.add(attempt)


class Transactional(LightningStore):
    """The base of the engine's parts."""

    _database: Database
    run_id: str

    async def _commit(self, plan: Callable[[], Awaitable[Change[T]]]) -> T:
        """Reads and writes as one step: plans again from fresh records whenever somebody else was faster.

        Raises:
            ConflictError: the race was lost ``MAX_RACES`` times; nothing was changed.
        """
        for race in range(MAX_RACES):
            change = await plan()
            if not change.writes:
                return change.result
            if await self._database.backend.commit(change.writes, change.guards, change.events):
                return change.result
            if race >= 2:  # several writers meet again and again: part them
                await asyncio.sleep(random.random() * min(0.001 * 2**race, 0.1))
        keys = ", ".join(f"{guard.kind.__name__} {'/'.join(map(str, guard.key))}" for guard in change.guards)
        raise ConflictError(f"others kept changing {keys} in {MAX_RACES} tries; nothing was written, try again later")

    async def _step(
        self,
        rollout_id: str,
        attempt_id: str,
        plan: Callable[[Row[Rollout], Row[Attempt]], Awaitable[Change[T]]],
        *,
        beats: bool = False,
    ) -> T:
        """As ``_commit``, for a change of an attempt.

        ``beats`` says that it writes a heartbeat too. Only then may it be planned from what is held, which spares the
        reads: spans renew the stored heartbeat without a new revision, and an older one must not replace it.
        """
        held = self._database.held.pop((rollout_id, attempt_id), None)
        if held is not None and beats:
            with contextlib.suppress(ConflictError):  # perhaps because it is outdated
                change = await plan(*held)
                if change.writes and await self._database.backend.commit(change.writes, change.guards, change.events):
                    self._hold_after(change, *held)
                    return change.result

        async def plan_afresh() -> Change[T]:
            return await plan(*await self._find_attempt(rollout_id, attempt_id))

        return await self._commit(plan_afresh)

    def _hold_after(self, change: Change[T], rollout: Row[Rollout], attempt: Row[Attempt]) -> None:
        for write in change.writes:
            if isinstance(write, Put) and isinstance(write.record, Rollout):
                rollout = Row(write.record, rollout.revision + 1)
            elif isinstance(write, Put) and isinstance(write.record, Attempt):
                attempt = Row(write.record, attempt.revision + 1)
        self._database.hold(rollout, attempt)

    async def _rows(self, query: Query[R]) -> Sequence[Row[R]]:
        return (await self._database.backend.select(query)).rows

    async def _row(self, kind: type[R], *key: str | int) -> Row[R] | None:
        where = tuple([Condition(name, "eq", value) for name, value in zip(KEYS[kind], key, strict=True)])
        rows = await self._rows(Query(kind, where))
        return rows[0] if rows else None

    async def _rollout(self, rollout_id: str) -> Row[Rollout]:
        row = await self._row(Rollout, rollout_id)
        if row is None:
            raise NotFoundError(f"no rollout {rollout_id!r} in this store")
        return row

    async def _latest_attempt(self, rollout_id: str) -> Row[Attempt] | None:
        where = (Condition("rollout_id", "eq", rollout_id),)
        rows = await self._rows(Query(Attempt, where, sort_by="sequence_id", descending=True, limit=1))
        return rows[0] if rows else None

    async def _find_attempt(self, rollout_id: str, attempt_id: str) -> tuple[Row[Rollout], Row[Attempt]]:
        """A rollout and one of its attempts, or its "latest".

        A live attempt is always the latest: whatever queues a rollout again or ends it ends its live attempt in the
        same commit, and only then can another begin.

        Raises:
            NotFoundError: there is no such rollout or attempt.
        """
        rollout = await self._rollout(rollout_id)
        if attempt_id == "latest":
            attempt = await self._latest_attempt(rollout_id)
        else:
            attempt = await self._row(Attempt, rollout_id, attempt_id)
        if attempt is None:
            raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
        return rollout, attempt

    async def _with_attempts(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Adds to each rollout its latest attempt, where it has one."""
        rollouts = list(rollouts)
        ids = tuple([rollout.rollout_id for rollout in rollouts if rollout.status != "queuing"])
        latest: dict[str, Attempt] = {}
        if ids:
            for row in await self._rows(Query(Attempt, (among("rollout_id", ids),))):
                known = latest.get(row.record.rollout_id)
                if known is None or known.sequence_id < row.record.sequence_id:
                    latest[row.record.rollout_id] = row.record
        return [
            attempted(rollout, latest[rollout.rollout_id]) if rollout.rollout_id in latest else rollout
            for rollout in rollouts
        ]

    async def _worker_row(self, worker_id: str) -> tuple[Row[Worker] | None, Worker]:
        """A worker as it is stored, and that or a new one."""
        row = await self._row(Worker, worker_id)
        return row, row.record if row is not None else Worker(worker_id=worker_id)

    async def _worker_after(self, attempt: Attempt, now: float) -> Worker | None:
        """A worker's record once it no longer works on ``attempt``; None if it says nothing about that one."""
        if attempt.worker_id is None:
            return None
        _, worker = await self._worker_row(attempt.worker_id)
        if worker.current_attempt_id != attempt.attempt_id:
            return None
        live = await self._live_attempts(attempt.worker_id)
        return describe_work(worker, [other for other in live if other.attempt_id != attempt.attempt_id], now)

    async def _live_attempts(self, worker_id: str) -> list[Attempt]:
        where = (Condition("worker_id", "eq", worker_id), Condition("status", "in", _LIVE))
        return [row.record for row in await self._rows(Query(Attempt, where))]


def among(field: str, values: Sequence[str]) -> Condition:
    """That a field is one of some values; of a single one in the form that every database answers fastest."""
    return Condition(field, "eq", values[0]) if len(values) == 1 else Condition(field, "in", tuple(values))


def attempted(rollout: Rollout, attempt: Attempt) -> AttemptedRollout:
    """Joins two stored records; they need no validation again."""
    return AttemptedRollout.from_valid({**rollout.__dict__, "attempt": attempt})


def now() -> float:
    """Unix time, the clock of all records."""
    return time.time()
