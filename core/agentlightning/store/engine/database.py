"""Access to the backend: look-ups, and commits that are repeated when another writer was faster."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.event import Event
from agentlightning.records import LIVE_ATTEMPT, Attempt, AttemptedRollout, Record, Rollout, Worker
from agentlightning.resources import ResourcesUpdate, split_version_id
from agentlightning.store.backend import KEYS, Backend, Condition, Listener, Put, Query, Row
from agentlightning.store.engine.change import Change
from agentlightning.store.lifecycle import MAX_LOST_CLAIMS, counts_as_lost

T = TypeVar("T")
R = TypeVar("R", bound=Record)

LIVE: Final = Condition("status", "in", tuple(sorted(LIVE_ATTEMPT)))
_MAX_RETRIES: Final = 50  # How often a commit is tried. Each failure means that another writer succeeded.
_MAX_CACHED: Final = 10_000


class Database:
    """Access to one open backend, shared by all views of a store.

    It caches live attempts with their rollouts, as this process wrote or read them last. Other processes may have
    written since: a commit that is planned from the cache is guarded by revisions and planned again if it fails.
    ``forget_ended`` has to get the events of the backend: another process may end an attempt that is cached here.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._live: OrderedDict[tuple[str, str], tuple[Row[Rollout], Row[Attempt]]] = OrderedDict()

    def now(self) -> float:
        """Unix time by the clock of the database."""
        return self.backend.now()

    async def commit(self, plan: Callable[[], Awaitable[Change[T]]]) -> T:
        """Commits a planned change; plans it again if another writer was faster, and finally raises ConflictError."""
        for retry in range(_MAX_RETRIES):
            change = await plan()
            if not change.writes or await self.try_commit(change):
                return change.result
            if retry >= 2:  # the same writers keep colliding: separate them
                await asyncio.sleep(random.random() * min(0.001 * 2**retry, 0.1))
        keys = ", ".join(f"{guard.kind.__name__} {'/'.join(map(str, guard.key))}" for guard in change.guards)
        raise ConflictError(f"other writers kept changing {keys}, {_MAX_RETRIES} times; nothing was written, try later")

    async def try_commit(self, change: Change[T]) -> bool:
        """Commits a change unless one of its guards fails."""
        return await self.backend.commit(change.writes, change.guards, change.events)

    async def change_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        plan: Callable[[Row[Rollout], Row[Attempt]], Awaitable[Change[T]]],
        *,
        is_heartbeat: bool = False,
    ) -> T:
        """Like ``commit``, for a change of an attempt (or the "latest") of a rollout; NotFoundError if it is unknown.

        ``is_heartbeat``: the change sets ``last_heartbeat_time``. Only such a change may be planned from the cache:
        spans renew the stored time without a new revision, and an older time must not replace it.
        """
        cached = self._live.pop((rollout_id, attempt_id), None)
        if cached is not None and is_heartbeat:
            with contextlib.suppress(ConflictError):  # perhaps because the cache is outdated
                change = await plan(*cached)
                if change.writes and await self.try_commit(change):
                    self._cache_after(change, *cached)
                    return change.result

        async def plan_from_stored() -> Change[T]:
            return await plan(*await self.attempt(rollout_id, attempt_id))

        return await self.commit(plan_from_stored)

    def cache(self, rollout: Row[Rollout], attempt: Row[Attempt]) -> None:
        """Caches an attempt that was just written, if it is live."""
        if attempt.record.status in LIVE_ATTEMPT:
            self._live[rollout.record.rollout_id, attempt.record.attempt_id] = rollout, attempt
            while len(self._live) > _MAX_CACHED:
                with contextlib.suppress(KeyError):  # another thread removed it first
                    self._live.popitem(last=False)

    @property
    def forget_ended(self) -> Listener:
        """Removes the attempts that have ended, according to events, from the cache; refers to no backend."""
        live = self._live

        def forget(events: Sequence[Event]) -> None:
            for event in events:
                if event.kind == "attempt_finished":
                    live.pop((event.rollout_id, event.attempt_id), None)

        return forget

    def is_cached(self, attempt: tuple[str, str]) -> bool:
        """Whether an attempt (rollout id, attempt id) is live and was claimed or changed in this process."""
        return attempt in self._live

    def is_running(self, attempt: tuple[str, str]) -> bool:
        """Whether an attempt (rollout id, attempt id) is known to be running; an attempt never returns to preparing."""
        cached = self._live.get(attempt)
        return cached is not None and cached[1].record.status == "running"

    def _cache_after(self, change: Change[T], rollout: Row[Rollout], attempt: Row[Attempt]) -> None:
        for write in change.writes:
            if isinstance(write, Put) and isinstance(write.record, Rollout):
                rollout = Row(write.record, rollout.revision + 1)
            elif isinstance(write, Put) and isinstance(write.record, Attempt):
                attempt = Row(write.record, attempt.revision + 1)
        self.cache(rollout, attempt)

    async def rows(self, query: Query[R]) -> Sequence[Row[R]]:
        return (await self.backend.select(query)).rows

    async def row(self, kind: type[R], *key: str | int) -> Row[R] | None:
        where = tuple([Condition(name, "eq", value) for name, value in zip(KEYS[kind], key, strict=True)])
        rows = await self.rows(Query(kind, where))
        return rows[0] if rows else None

    async def record(self, kind: type[R], *key: str | int) -> R | None:
        row = await self.row(kind, *key)
        return None if row is None else row.record

    async def rollout(self, rollout_id: str) -> Row[Rollout]:
        row = await self.row(Rollout, rollout_id)
        if row is None:
            raise NotFoundError(f"no rollout {rollout_id!r} in this store")
        return row

    async def run_of(self, attempt: tuple[str, str]) -> str:
        """Returns the run of an attempt (rollout id, attempt id)."""
        cached = self._live.get(attempt)
        return (await self.rollout(attempt[0]) if cached is None else cached[0]).record.run_id

    async def attempt(self, rollout_id: str, attempt_id: str) -> tuple[Row[Rollout], Row[Attempt]]:
        """Returns a rollout and one of its attempts, or the "latest"; NotFoundError if one of them is unknown.

        A live attempt is always the latest: a commit that requeues or ends a rollout also ends its live attempt, and
        another attempt can begin only after that.
        """
        rollout = await self.rollout(rollout_id)
        if attempt_id == "latest":
            attempt = await self.latest_attempt(rollout_id)
        else:
            attempt = await self.row(Attempt, rollout_id, attempt_id)
        if attempt is None:
            raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
        return rollout, attempt

    async def latest_attempt(self, rollout_id: str) -> Row[Attempt] | None:
        where = (Condition("rollout_id", "eq", rollout_id),)
        rows = await self.rows(Query(Attempt, where, sort_by="sequence_id", descending=True, limit=1))
        return rows[0] if rows else None

    async def count_lost_claims(self, attempt: Attempt) -> int:
        """Returns how many earlier attempts of the rollout ended because a worker died; 0 if too few to matter."""
        if attempt.status != "preparing" or attempt.sequence_id < MAX_LOST_CLAIMS:
            return 0
        rows = await self.rows(Query(Attempt, (Condition("rollout_id", "eq", attempt.rollout_id),)))
        return sum(counts_as_lost(row.record) for row in rows)

    async def live_attempts(self, worker_id: str) -> list[Attempt]:
        where = (Condition("worker_id", "eq", worker_id), LIVE)
        return [row.record for row in await self.rows(Query(Attempt, where))]

    async def worker(self, worker_id: str) -> Worker:
        """Returns the record of a worker, or a new record."""
        return await self.record(Worker, worker_id) or Worker(worker_id=worker_id)

    async def with_attempts(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Adds the latest attempt to each rollout that has one."""
        rollouts = list(rollouts)
        ids = [rollout.rollout_id for rollout in rollouts if rollout.status != "queuing"]
        latest: dict[str, Attempt] = {}
        if ids:
            for row in await self.rows(Query(Attempt, (is_in("rollout_id", ids),))):
                known = latest.get(row.record.rollout_id)
                if known is None or known.sequence_id < row.record.sequence_id:
                    latest[row.record.rollout_id] = row.record
        return [
            join(rollout, latest[rollout.rollout_id]) if rollout.rollout_id in latest else rollout
            for rollout in rollouts
        ]

    async def resources(self, resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        """Returns a version of a snapshot (None: the newest); ``resources_id`` may name it too, as in ``rs-1@3``."""
        resources_id, version = split_version_id(resources_id, version)
        if version is None:
            return await self.newest_resources(resources_id=resources_id)
        return await self.record(ResourcesUpdate, resources_id, version)

    async def check_resources(self, resources_id: str) -> None:
        if await self.resources(resources_id) is None:
            raise NotFoundError(f"no resources {resources_id!r} in this store; publish them with add_resources")

    async def newest_resources(self, **where: str) -> ResourcesUpdate | None:
        """Returns the resources published last with these fields: a ``run_id`` or a ``resources_id``."""
        conditions = tuple([Condition(name, "eq", value) for name, value in where.items()])
        rows = await self.rows(Query(ResourcesUpdate, conditions, descending=True, limit=1))
        return rows[0].record if rows else None


def is_in(field: str, values: Sequence[str]) -> Condition:
    """Returns the condition that a field has one of the values; ``eq`` is faster for a single value."""
    return Condition(field, "eq", values[0]) if len(values) == 1 else Condition(field, "in", tuple(values))


def join(rollout: Rollout, attempt: Attempt) -> AttemptedRollout:
    """Joins two stored records without validating them again."""
    return AttemptedRollout.from_valid({**rollout.__dict__, "attempt": attempt})
