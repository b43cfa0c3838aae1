"""``BackendStore``: implements ``LightningStore`` over any ``Backend``."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, cast

from agentlightning.errors import ConfigError
from agentlightning.event import EVENT_KINDS, Event
from agentlightning.records import (
    DEFAULT_RUN_ID,
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Metrics,
    PaginatedResult,
    Rollout,
    RolloutStatus,
    Run,
    RunStatus,
    Span,
    Unset,
    Worker,
)
from agentlightning.resources import Resource, ResourcesUpdate
from agentlightning.store.backend import Backend, Condition, Query
from agentlightning.store.capabilities import StoreCapabilities
from agentlightning.store.check import check_choice, check_int, check_run_id
from agentlightning.store.engine.attempts import Attempts
from agentlightning.store.engine.database import Database
from agentlightning.store.engine.queue import Queue
from agentlightning.store.engine.rollouts import Rollouts
from agentlightning.store.engine.runs import Runs
from agentlightning.store.engine.watchdog import Watchdog
from agentlightning.store.engine.workers import Workers
from agentlightning.store.filter import find, make_query, read_cursor
from agentlightning.store.protocol import LightningStore
from agentlightning.store.retention import RetentionPolicy, delete_ended
from agentlightning.store.waiting import Waiters, deadline_after

F = TypeVar("F", bound=Callable[..., Any])


def implements(declared: F) -> Callable[[Callable[..., Any]], F]:
    """Gives the declared method's signature and docstring to a method that forwards its keyword arguments."""
    return lambda method: cast(F, functools.update_wrapper(method, declared, assigned=["__doc__"], updated=()))


class BackendStore(LightningStore):
    """A store over a database. Safe to use from any thread and event loop, as the backend is.

    Each process that opens the database enforces timeouts, unresponsiveness and leases in a daemon thread. The thread
    starts with the first attempt, or immediately if the database is durable and may hold attempts of dead processes.
    """

    def __init__(
        self,
        backend: Backend,
        run_id: str = DEFAULT_RUN_ID,
        *,
        lease_s: float = 60.0,
        watchdog_interval_s: float | None = 1.0,
    ) -> None:
        """Opens a store.

        Args:
            backend: the database; ``close`` closes it.
            run_id: the run that this object sees.
            lease_s: an attempt is lost when neither a span nor a heartbeat of its worker was seen for this long.
            watchdog_interval_s: how late the end of an attempt may be enforced; None leaves it to other processes.
        """
        if not lease_s > 0:
            raise ConfigError(f"lease_s={lease_s}; it must be above 0")
        self.run_id = check_run_id(run_id)
        self._opened_at = time.monotonic()
        self._database = database = Database(backend)
        self._waiters = Waiters()
        self._watches = [backend.watch(listener) for listener in (database.forget_ended, self._waiters.publish)]
        self._watchdog = Watchdog(database, lease_s, watchdog_interval_s)
        self._attempts = Attempts(database)
        self._rollouts = Rollouts(database, self._waiters)
        self._workers = Workers(database, self._attempts, lease_s)
        self._runs = Runs(database)
        self._queue = Queue(database, self._waiters, self._attempts, self._watchdog)
        if backend.durable:
            self._watchdog.start()

    def with_run(self, run_id: str) -> Self:
        view = self.__class__.__new__(self.__class__)  # shares everything but the run, also of a subclass
        view.__dict__.update(self.__dict__, run_id=run_id)
        return view

    def retain(self, retention: RetentionPolicy) -> None:
        """Makes the watchdog delete the ended rollouts, of all runs, that a policy does not keep; needs a watchdog."""
        if self._watchdog.interval_s is None:
            raise ConfigError("watchdog_interval_s=None: this store has no watchdog; call retain on a store with one")
        self._watchdog.retention = retention
        self._watchdog.start()

    @property
    def backend(self) -> Backend:
        """The database of this store."""
        return self._database.backend

    @property
    def capabilities(self) -> StoreCapabilities:
        return {"thread_safe": True, "durable": self.backend.durable, "otlp_traces": False}

    def now(self) -> float:
        return self._database.now()

    async def statistics(self) -> dict[str, float]:
        counts = await self._database.backend.count()
        return {**counts, "uptime": time.monotonic() - self._opened_at}

    async def close(self) -> None:
        """Ends all waits, stops the watchdog and closes the database. Closing twice is harmless."""
        self._waiters.close()
        await asyncio.to_thread(self._watchdog.stop)  # it may be in the middle of a scan
        loop = asyncio.get_running_loop()
        if tasks := [task for task in tuple(self._queue.background) if task.get_loop() is loop]:
            await asyncio.wait(tasks)
        for stop_watching in self._watches:
            stop_watching()
        await self._database.backend.close()

    # --- rollouts ---

    @implements(LightningStore.start_rollout)
    async def start_rollout(self, *, worker_id: str | None = None, **request: Any) -> AttemptedRollout:
        return await self._queue.start(self.run_id, EnqueueRolloutRequest.model_validate(request), worker_id)

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        return await self._queue.enqueue(self.run_id, requests)

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0
    ) -> Sequence[AttemptedRollout]:
        check_int("limit", limit, 0)
        deadline = deadline_after(timeout)
        return await self._queue.claim(self.run_id, limit, worker_id, deadline) if limit else []

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        return await self._queue.start_attempt(rollout_id, worker_id)

    @implements(LightningStore.query_rollouts)
    async def query_rollouts(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        cursor: str | None = None,
        **filters: Any,
    ) -> PaginatedResult[Rollout]:
        scope = [Condition("run_id", "eq", run_id if run_id is not None else self.run_id)]
        scope += [Condition(f"metadata.{key}", "eq", value) for key, value in (metadata or {}).items()]
        query = make_query(Rollout, scope, cursor=cursor, **filters)
        page = await find(self._database.backend, query, cursor)
        return page.model_copy(update={"items": await self._database.with_attempts(page.items)})

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        rollout = await self._database.record(Rollout, rollout_id)
        return None if rollout is None else (await self._database.with_attempts([rollout]))[0]

    @implements(LightningStore.update_rollout)
    async def update_rollout(self, rollout_id: str, *, status: RolloutStatus | Unset = UNSET, **fields: Any) -> Rollout:
        changes = _given(fields)
        if changes.get("resources_id") is not None:
            await self._database.check_resources(changes["resources_id"])
        return await self._rollouts.update(rollout_id, status, changes)

    async def retry_rollout(self, rollout_id: str) -> Rollout:
        return await self._rollouts.retry(rollout_id)

    @implements(LightningStore.delete_rollouts)
    async def delete_rollouts(self, rollout_ids: Sequence[str] | None = None, **conditions: Any) -> int:
        given = {name for name, value in conditions.items() if value is not None}
        if given if rollout_ids is not None else not given - {"limit"}:
            raise ConfigError(
                "delete_rollouts takes either rollout_ids, or one or more of status_in, ended_before and keep"
            )
        if rollout_ids is not None:
            return await self._rollouts.delete(rollout_ids)
        return await delete_ended(self._database.backend, self.run_id, **conditions)

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        return await self._rollouts.wait(rollout_ids, deadline_after(timeout))

    # --- attempts ---

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        row = await self._database.latest_attempt(rollout_id)
        return None if row is None else row.record

    @implements(LightningStore.query_attempts)
    async def query_attempts(
        self, rollout_id: str, *, sort_by: str = "sequence_id", **page: Any
    ) -> PaginatedResult[Attempt]:
        query = make_query(Attempt, [Condition("rollout_id", "eq", rollout_id)], sort_by=sort_by, **page)
        return await find(self._database.backend, query)

    @implements(LightningStore.update_attempt)
    async def update_attempt(
        self, rollout_id: str, attempt_id: str, *, status: AttemptStatus | Unset = UNSET, **fields: Any
    ) -> Attempt:
        return await self._attempts.update(rollout_id, attempt_id, status, _given(fields))

    async def release_attempt(self, rollout_id: str, attempt_id: str) -> Rollout:
        return await self._attempts.release(rollout_id, attempt_id)

    # --- spans ---

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        return await self._attempts.add_spans(spans) if spans else []

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        return await self._attempts.take_sequence_ids([(pair[0], pair[1]) for pair in rollout_attempt_ids])

    @implements(LightningStore.query_spans)
    async def query_spans(
        self,
        rollout_id: str | None,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        sort_by: str | None = "sequence_id",
        run_id: str | None = None,
        cursor: str | None = None,
        **filters: Any,
    ) -> PaginatedResult[Span]:
        if attempt_id == "latest":
            if rollout_id is None:
                raise ConfigError("attempt_id='latest' needs a rollout_id")
            latest = await self.get_latest_attempt(rollout_id)
            attempt_id = "" if latest is None else latest.attempt_id
        if rollout_id is None and run_id is None:
            run_id = self.run_id
        if (rollout_id is None or cursor is not None) and sort_by == "sequence_id":
            sort_by = None
        fields = {"rollout_id": rollout_id, "attempt_id": attempt_id, "run_id": run_id}
        scope = [Condition(name, "eq", value) for name, value in fields.items() if value is not None]
        query = make_query(Span, scope, sort_by=sort_by, cursor=cursor, **filters)
        return await find(self._database.backend, query, cursor)

    async def poll_new_spans(self, cursor: str | None = None, *, limit: int = 1000) -> PaginatedResult[Span]:
        check_int("limit", limit, 1)
        place, _, seen = (cursor or "0.0.0").partition("/")
        where = (Condition("run_id", "eq", self.run_id),)
        query = Query(Span, where, limit=limit, after=read_cursor(place)[0], seen=seen)
        page = await self.backend.select(query)
        position = query.after if page.position is None else page.position
        spans = [row.record for row in page.rows]
        return PaginatedResult[Span].model_construct(
            items=spans, limit=limit, offset=0, total=len(spans), cursor=f"{position}.0.0/{page.seen}".rstrip("/")
        )

    # --- resources ---

    async def update_resources(self, resources_id: str, resources: Mapping[str, Resource | str]) -> ResourcesUpdate:
        return await self._runs.publish(self.run_id, resources_id, resources)

    async def get_resources_by_id(self, resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        return await self._database.resources(resources_id, version)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._database.newest_resources(run_id=self.run_id)

    @implements(LightningStore.query_resources)
    async def query_resources(self, **filters: Any) -> PaginatedResult[ResourcesUpdate]:
        query = make_query(ResourcesUpdate, [Condition("run_id", "eq", self.run_id)], **filters)
        return await find(self._database.backend, query)

    # --- workers ---

    @implements(LightningStore.query_workers)
    async def query_workers(self, **filters: Any) -> PaginatedResult[Worker]:
        return await self._workers.query(make_query(Worker, **filters))

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return await self._workers.get(worker_id)

    @implements(LightningStore.update_worker)
    async def update_worker(
        self, worker_id: str, *, attempt_ids: Sequence[str] | Unset | None = UNSET, **fields: Any
    ) -> Worker:
        return await self._workers.beat(worker_id, _given(fields), attempt_ids)

    async def end_worker(self, worker_id: str) -> int:
        return await self._workers.end(worker_id)

    # --- runs, metrics, events ---

    @implements(LightningStore.create_run)
    async def create_run(self, *, run_id: str | None = None, config: Any = None, **fields: Any) -> Run:
        run_id = self.run_id if run_id is None else run_id
        return await self._runs.create(Run.model_validate({"run_id": run_id, "config": config or {}, **fields}))

    async def get_run_by_id(self, run_id: str) -> Run | None:
        return await self._database.record(Run, run_id)

    async def update_run(self, run_id: str, status: RunStatus) -> Run:
        return await self._runs.update(run_id, status)

    async def query_runs(self, *, limit: int = -1, offset: int = 0) -> PaginatedResult[Run]:
        return await find(self._database.backend, make_query(Run, limit=limit, offset=offset))

    async def find_open_runs(self) -> Sequence[str]:
        find = getattr(self._database.backend, "find_open_runs", None)  # not every backend can do that quickly
        runs: Sequence[str] = await (super().find_open_runs() if find is None else find())
        return runs

    async def add_metrics(self, step: int, values: Mapping[str, float]) -> Metrics:
        return await self._runs.add_metrics(self.run_id, step, values)

    async def query_metrics(self, *, limit: int = -1, offset: int = 0) -> PaginatedResult[Metrics]:
        query = make_query(
            Metrics, [Condition("run_id", "eq", self.run_id)], sort_by="step", limit=limit, offset=offset
        )
        return await find(self._database.backend, query)

    def subscribe(self, kinds: Sequence[str] | None = None, *, every_run: bool = False) -> AsyncIterator[Event]:
        for kind in kinds or ():
            check_choice("kinds", kind, EVENT_KINDS)
        return self._waiters.events(None if every_run else self.run_id, None if kinds is None else frozenset(kinds))


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that were given."""
    return {name: value for name, value in arguments.items() if value is not UNSET}
