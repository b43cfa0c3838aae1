"""The engine's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from agentlightning.errors import ConfigError
from agentlightning.frozen import freeze
from agentlightning.store.backend import Put
from agentlightning.store.filter import Filter, check_choice, find
from agentlightning.store.transaction import Transactional, now
from agentlightning.store.transition import describe_work
from agentlightning.types import UNSET, FilterLogic, PaginatedResult, SortOrder, Unset, Worker, WorkerStatus


class WorkerMethods(Transactional):
    """Workers, as their claims, results and heartbeats show them.

    A worker is busy while it has live attempts (``current_*`` name the newest), idle without one, and unknown once its
    lease ran out. These records inform people and renew leases; nothing is decided by ``status``. They are therefore
    written without guards, and what a race between two writers leaves behind is put right by the next heartbeat.
    """

    async def query_workers(
        self,
        *,
        status_in: Sequence[str] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        for status in status_in or ():
            check_choice("status_in", status, get_args(WorkerStatus))
        query = (
            Filter(filter_logic)
            .among(status=status_in)
            .contain(worker_id=worker_id_contains)
            .query(Worker, sort_by=sort_by, sort_order=sort_order, limit=limit, offset=offset)
        )
        return await find(self._database.backend, query)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        row = await self._row(Worker, worker_id)
        return None if row is None else row.record

    async def update_worker(self, worker_id: str, heartbeat_stats: Mapping[str, Any] | Unset | None = UNSET) -> Worker:
        if not worker_id:
            raise ConfigError("worker_id is empty")
        time = now()
        _, worker = await self._worker_row(worker_id)
        worker = describe_work(worker, await self._live_attempts(worker_id), time)
        changes: dict[str, Any] = {"last_heartbeat_time": time}
        if heartbeat_stats is not UNSET:
            changes["heartbeat_stats"] = None if heartbeat_stats is None else freeze(dict(heartbeat_stats))
        worker = worker.model_copy(update=changes)
        await self._database.backend.commit([Put(worker)])
        return worker
