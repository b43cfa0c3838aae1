"""What the store server tells Prometheus: its requests, and how the store stands."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, get_args

from agentlightning.store.protocol import LightningStore
from agentlightning.types import DEFAULT_RUN_ID, RolloutStatus, WorkerStatus
from agentlightning_plugins.prometheus import Labels, Registry
from agentlightning_plugins.stores.http.server.events import EventStreams
from agentlightning_plugins.stores.http.server.polling import Polls

MAX_RUNS: Final = 20
"""Of how many runs the rollouts are counted: a scrape must stay cheap."""
_QUEUED: Final[tuple[RolloutStatus, ...]] = ("queuing", "requeuing")
_LATENCY_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Samples = list[tuple[Labels, float]]


class ServerMetrics:
    """Counts requests as they are answered, and asks the store for the rest when it is scraped."""

    def __init__(self, store: LightningStore, polls: Polls, streams: EventStreams) -> None:
        self._store = store
        registry = self._registry = Registry()
        self._requests = registry.counter("agl_store_requests_total", "Requests answered.", "method", "route", "status")
        self._latency = registry.histogram(
            "agl_store_request_seconds",
            "Time to answer a request, waiting by request included.",
            "method",
            "route",
            buckets=_LATENCY_BUCKETS_S,
        )
        self._samples: dict[str, Samples] = {}
        self._gauge("agl_store_rollouts", "Rollouts of the newest runs.", "run", "status")
        self._gauge("agl_store_queue_depth", "Rollouts that wait for a worker.", "run")
        self._gauge("agl_store_oldest_queued_seconds", "Age of the rollout that has waited longest.", "run")
        self._gauge("agl_store_workers", "Workers seen so far.", "status")
        self._gauge("agl_store_records", "Stored records of all runs.", "kind")
        self._gauge("agl_store_uptime_seconds", "Time since the store was opened.")
        registry.gauge(
            "agl_store_event_subscribers", "Readers of /events.", read=lambda: [((), float(streams.subscribers))]
        )
        registry.gauge(
            "agl_store_waiting_requests",
            "Requests that wait for work or for results.",
            read=lambda: [((), polls.waiting)],
        )

    def record(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts one answered request."""
        self._requests.add(method, route, str(status))
        self._latency.observe(method, route, value=seconds)

    async def render(self) -> str:
        """Everything in Prometheus' text format."""
        statistics = await self._store.statistics()
        uptime_s = statistics.pop("uptime")
        self._samples["agl_store_uptime_seconds"] = [((), uptime_s)]
        self._samples["agl_store_records"] = [((kind,), count) for kind, count in statistics.items()]
        self._samples["agl_store_workers"] = [((status,), await self._workers(status)) for status in _statuses()]
        rollouts: Samples = []
        depths: Samples = []
        ages: Samples = []
        for run_id in await self._run_ids():
            counts = {status: await self._rollouts(run_id, status) for status in get_args(RolloutStatus)}
            rollouts += [((run_id, status), count) for status, count in counts.items()]
            depths.append(((run_id,), sum(counts[status] for status in _QUEUED)))
            ages.append(((run_id,), await self._oldest_queued_s(run_id) if depths[-1][1] else 0.0))
        self._samples["agl_store_rollouts"] = rollouts
        self._samples["agl_store_queue_depth"] = depths
        self._samples["agl_store_oldest_queued_seconds"] = ages
        return self._registry.render()

    def _gauge(self, name: str, help: str, *labels: str) -> None:
        self._registry.gauge(name, help, *labels, read=lambda: self._samples.get(name, ()))

    async def _run_ids(self) -> Iterable[str]:
        """The default run and the newest of the others."""
        total = (await self._store.query_runs(limit=0)).total
        newest = await self._store.query_runs(limit=MAX_RUNS, offset=max(0, total - MAX_RUNS))
        return dict.fromkeys([DEFAULT_RUN_ID, *(run.run_id for run in newest)])

    async def _rollouts(self, run_id: str, status: RolloutStatus) -> int:
        return (await self._store.query_rollouts(run_id=run_id, status_in=[status], limit=0)).total

    async def _workers(self, status: WorkerStatus) -> int:
        return (await self._store.query_workers(status_in=[status], limit=0)).total

    async def _oldest_queued_s(self, run_id: str) -> float:
        """By enqueueing: a rollout that was queued again has waited since then, with pauses."""
        first = [await self._store.query_rollouts(run_id=run_id, status_in=[status], limit=1) for status in _QUEUED]
        since = min([page[0].start_time for page in first if page], default=None)
        return 0.0 if since is None else max(0.0, time.time() - since)


def _statuses() -> tuple[WorkerStatus, ...]:
    return get_args(WorkerStatus)
