from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from agentlightning.event import Event, event_adapter
from agentlightning.types import (
    UNSET,
    FilterLogic,
    Metrics,
    PaginatedResult,
    Run,
    RunStatus,
    SortOrder,
    Unset,
    Worker,
)
from agentlightning_plugins.stores.http import message
from agentlightning_plugins.stores.http.client.call import StoreCalls, frozen, given, query_string, quoted, read_page


class RunCalls(StoreCalls):
    """The part of the client that is about runs: their workers, metrics and events."""

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
        body = {
            "status_in": status_in,
            "worker_id_contains": worker_id_contains,
            "filter_logic": filter_logic,
            "sort_by": sort_by,
            "sort_order": sort_order,
            "limit": limit,
            "offset": offset,
        }
        page = await self._post("/workers/search", body, repeatable=True)
        return read_page(page, [Worker.model_validate(item) for item in page["items"]])

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        content = await self._find(f"/workers/{quoted(worker_id)}")
        return None if content is None else Worker.model_validate(content)

    async def update_worker(
        self,
        worker_id: str,
        heartbeat_stats: Mapping[str, Any] | Unset | None = UNSET,
        attempt_ids: Sequence[str] | Unset | None = UNSET,
    ) -> Worker:
        body = given(heartbeat_stats=frozen(heartbeat_stats, "heartbeat_stats"), attempt_ids=attempt_ids)
        return Worker.model_validate(await self._post(f"/workers/{quoted(worker_id)}", body, repeatable=True))

    async def end_worker(self, worker_id: str) -> int:
        answer = await self._post(f"/workers/{quoted(worker_id)}/end", repeatable=True)
        return int(answer["ended"])

    async def create_run(
        self,
        name: str,
        *,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Run:
        body = {
            "name": name,
            "run_id": run_id,
            "config": frozen(config or {}, "config"),
            "metadata": frozen(metadata, "metadata"),
        }
        return Run.model_validate(await self._post("/runs", body, repeatable=True))

    async def get_run_by_id(self, run_id: str) -> Run | None:
        content = await self._find(f"/runs/{quoted(run_id)}")
        return None if content is None else Run.model_validate(content)

    async def update_run(self, run_id: str, status: RunStatus) -> Run:
        body: message.UpdateRun = {"status": status}
        return Run.model_validate(await self._post(f"/runs/{quoted(run_id)}", body, repeatable=True))

    async def query_runs(self, *, limit: int = -1, offset: int = 0) -> PaginatedResult[Run]:
        page = await self._get("/runs?" + query_string({"limit": limit, "offset": offset}))
        return read_page(page, [Run.model_validate(item) for item in page["items"]])

    async def add_metrics(self, step: int, values: Mapping[str, float]) -> Metrics:
        given = Metrics(run_id=self.run_id, step=step, time=time.time(), values=dict(values))
        body = {"step": step, "values": given.values}
        return Metrics.model_validate(await self._post(f"/runs/{quoted(self.run_id)}/metrics", body, repeatable=True))

    async def query_metrics(self, *, limit: int = -1, offset: int = 0) -> PaginatedResult[Metrics]:
        query = query_string({"limit": limit, "offset": offset})
        page = await self._get(f"/runs/{quoted(self.run_id)}/metrics?{query}")
        return read_page(page, [Metrics.model_validate(item) for item in page["items"]])

    async def subscribe(self, kinds: Sequence[str] | None = None) -> AsyncIterator[Event]:
        """Yields the events of this run, from the moment the first ``anext`` has reached the server.

        The stream survives a restart of the server; events of the time in between are not seen.
        """
        query = urlencode([("kinds", kind) for kind in kinds or ()])
        async for data in self._connection.events(f"/events?{query}", run_id=self.run_id):
            yield event_adapter.validate_json(data)
