"""Prometheus metrics of the store server."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from importlib.metadata import version
from typing import Any, Final, get_args

from prometheus_client import Counter, Histogram, Info, ProcessCollector
from prometheus_client.core import GaugeMetricFamily

from agentlightning.errors import LightningError
from agentlightning.store.protocol import LightningStore
from agentlightning.types import DEFAULT_RUN_ID, AttemptedRollout, PaginatedResult, Rollout, RolloutStatus, WorkerStatus
from agentlightning_plugins.shared.monitoring.runs import count_rollouts, read_live_state
from agentlightning_plugins.shared.web.metrics import ScrapedMetrics
from agentlightning_plugins.stores.http.message import PREFIX
from agentlightning_plugins.stores.http.server.events import EventStreams
from agentlightning_plugins.stores.http.server.polling import Polls

MAX_RUNS: Final = 20
"""The number of runs without open work whose rollouts are counted: a scrape must stay cheap."""
_QUEUED: Final[tuple[RolloutStatus, ...]] = ("queuing", "requeuing")
_ENDED: Final[tuple[RolloutStatus, ...]] = ("succeeded", "failed")
_REWARDED: Final = 200
"""The number of newest ended rollouts of a run whose rewards are averaged."""
_REFRESHED: Final = 5
"""The number of runs whose rewards a scrape reads; for other runs it repeats what an earlier scrape read."""
ANSWER_S: Final = 2.0
"""How long probes and scrapes wait for the database."""
_LONG_POLLS: Final = frozenset(PREFIX + path for path in ("/events", "/queues/rollouts/dequeue", "/waits/rollouts"))
_LATENCY_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ServerMetrics(ScrapedMetrics):
    """Counts answered requests, and reads the gauges from the store at each scrape."""

    def __init__(self, store: LightningStore, polls: Polls, streams: EventStreams) -> None:
        super().__init__()
        self._store = store
        self._polls = polls
        self._streams = streams
        registry = self.registry
        self._requests = Counter(
            "agl_store_requests_total", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self.refused_spans = Counter(
            "agl_store_refused_spans_total",
            "Spans that their sender may not write, or that are invalid.",
            registry=registry,
        )
        settings: dict[str, Any] = {"registry": registry, "buckets": _LATENCY_BUCKETS_S}
        self._latency = Histogram(
            "agl_store_request_seconds",
            "Time to answer a request, without long polls.",
            ["method", "route"],
            **settings,
        )
        self._polling = Histogram(
            "agl_store_long_poll_seconds",
            "Time to answer a long poll, including its wait.",
            ["method", "route"],
            **settings,
        )
        self._event_lag = Histogram(
            "agl_store_event_lag_seconds", "Time from an event to its delivery to readers of /events.", **settings
        )
        Info("agl_build", "This version.", registry=registry).info({"version": version("lightning")})
        ProcessCollector(registry=registry)
        streams.on_event = lambda event: self._event_lag.observe(max(0.0, store.now() - event.time))
        self._reading: asyncio.Task[list[GaugeMetricFamily]] | None = None
        self._rewards: dict[str, tuple[object, dict[tuple[str, str], float]]] = {}
        """By run: the state in which its rewards were read, and their means; the run that was read last is last."""

    def record(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts one answered request."""
        self._requests.labels(method, route, status).inc()
        histogram = self._polling if route in _LONG_POLLS else self._latency
        histogram.labels(method, route).observe(seconds)

    async def render(self) -> bytes:
        """Renders all metrics in Prometheus' text format; without the store's if it does not answer."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_store())
            # Retrieves an error that comes after the answer, so that asyncio does not log it as never retrieved.
            self._reading.add_done_callback(lambda reading: reading.cancelled() or reading.exception())
        done, _ = await asyncio.wait({self._reading}, timeout=ANSWER_S)
        is_up = bool(done) and self._reading.exception() is None
        up = GaugeMetricFamily("agl_store_up", "Whether the database answers.", float(is_up))
        return await self.render_with([up, *(self._reading.result() if is_up else ())])

    async def find_problem(self) -> str | None:
        """Reads the store; returns why that fails, or None if it answers in time."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._store.statistics()
        except TimeoutError:
            return f"the database has not answered for {ANSWER_S:g} s"
        except (LightningError, OSError) as error:
            return str(error)
        return None

    async def _read_store(self) -> list[GaugeMetricFamily]:
        begun = time.perf_counter()
        gauges = [gauge async for gauge in self._read_gauges()]
        seconds = time.perf_counter() - begun
        return [*gauges, GaugeMetricFamily("agl_store_database_seconds", "Time to read these numbers.", seconds)]

    async def _read_gauges(self) -> AsyncIterator[GaugeMetricFamily]:
        rollouts = GaugeMetricFamily(
            "agl_store_rollouts", "Rollouts of the newest and the open runs.", labels=["run", "status"]
        )
        depth = GaugeMetricFamily("agl_store_queue_depth", "Rollouts that wait for a worker.", labels=["run"])
        age = GaugeMetricFamily(
            "agl_store_oldest_queued_seconds", "Age of the rollout that has waited longest.", labels=["run"]
        )
        run_ids = list(await self._run_ids())
        for run_id in run_ids:
            counts = await count_rollouts(self._store.with_run(run_id))
            for status, count in counts.items():
                rollouts.add_metric([run_id, status], count)
            queued = sum(counts[status] for status in _QUEUED)
            depth.add_metric([run_id], queued)
            age.add_metric([run_id], await self._oldest_queued_s(run_id) if queued else 0.0)
        for gauge in (rollouts, depth, age, *await self._read_learning(run_ids)):
            yield gauge

        workers = GaugeMetricFamily("agl_store_workers", "Workers seen so far.", labels=["status"])
        seen = collections.Counter(worker.status for worker in await self._store.query_workers())
        for status in get_args(WorkerStatus):
            workers.add_metric([status], seen[status])
        yield workers
        statistics = await self._store.statistics()
        uptime_s = statistics.pop("uptime")
        records = GaugeMetricFamily("agl_store_records", "Stored records of all runs.", labels=["kind"])
        for kind, number in statistics.items():
            records.add_metric([kind], number)
        yield records
        yield GaugeMetricFamily("agl_store_uptime_seconds", "Time since the store was opened.", uptime_s)
        yield GaugeMetricFamily("agl_store_event_subscribers", "Readers of /events.", self._streams.subscribers)
        yield GaugeMetricFamily(
            "agl_store_waiting_requests", "Requests that wait for work or for results.", self._polls.waiting
        )

    async def _read_learning(self, run_ids: Sequence[str]) -> list[GaugeMetricFamily]:
        """Returns the rewards of each version of resources, the promoted versions, and the trials of live learning."""
        reward = GaugeMetricFamily(
            "agl_store_reward", f"Mean over the newest {_REWARDED} ended rollouts.", labels=["run", "version", "mode"]
        )
        promoted = GaugeMetricFamily("agl_store_promoted_version", "The latest resources.", labels=["run", "resources"])
        phase = GaugeMetricFamily("agl_store_trial_phase", "The phase of live learning is 1.", labels=["run", "phase"])
        share = GaugeMetricFamily("agl_store_trial_share", "Share of the candidate in the traffic.", labels=["run"])
        alarms = GaugeMetricFamily("agl_store_promotions_taken_back", "Promotions that did not last.", labels=["run"])
        await self._refresh_rewards(run_ids)
        for run_id in run_ids:
            for label, mean in self._rewards.get(run_id, (None, {}))[1].items():
                reward.add_metric([run_id, *label], mean)
            latest = await self._store.with_run(run_id).get_latest_resources()
            if latest is not None:
                promoted.add_metric([run_id, latest.resources_id], latest.version)
            state: Any = await read_live_state(self._store.with_run(run_id))
            if state is not None:
                phase.add_metric([run_id, state.phase], 1.0)
                share.add_metric([run_id], state.share)
                alarms.add_metric([run_id], state.alarms)
        return [reward, promoted, phase, share, alarms]

    async def _refresh_rewards(self, run_ids: Sequence[str]) -> None:
        """Reads the rewards of runs in which rollouts have ended since, first of the run that was read longest ago."""
        changed: dict[str, object] = {}
        for run_id in run_ids:
            newest = await self._ended(run_id, 1)
            state = newest.total, [rollout.rollout_id for rollout in newest]
            if run_id not in self._rewards or self._rewards[run_id][0] != state:
                changed[run_id] = state
        kept = {run_id: found for run_id, found in self._rewards.items() if run_id in run_ids}
        never = [run_id for run_id in changed if run_id not in kept]
        for run_id in [*never, *(run_id for run_id in kept if run_id in changed)][:_REFRESHED]:
            rewards: dict[tuple[str, str], list[float]] = {}
            for rollout in await self._ended(run_id, _REWARDED):
                if isinstance(rollout, AttemptedRollout) and rollout.attempt.reward is not None:
                    label = rollout.resources_id or "", rollout.mode or ""
                    rewards.setdefault(label, []).append(rollout.attempt.reward)
            kept.pop(run_id, None)
            kept[run_id] = changed[run_id], {label: math.fsum(each) / len(each) for label, each in rewards.items()}
        self._rewards = kept

    async def _ended(self, run_id: str, limit: int) -> PaginatedResult[Rollout]:
        view = self._store.with_run(run_id)
        return await view.query_rollouts(status_in=_ENDED, sort_order="desc", limit=limit)

    async def _run_ids(self) -> Iterable[str]:
        """Returns the ids of the default run, the newest runs, and all runs with queued or running rollouts."""
        total = (await self._store.query_runs(limit=0)).total
        newest = await self._store.query_runs(limit=MAX_RUNS, offset=max(0, total - MAX_RUNS))
        open_runs = await self._store.find_open_runs()
        return dict.fromkeys([DEFAULT_RUN_ID, *(run.run_id for run in newest), *open_runs])

    async def _oldest_queued_s(self, run_id: str) -> float:
        """Returns the time since the oldest queued rollout was created, which includes its earlier attempts."""
        first = [await self._store.query_rollouts(run_id=run_id, status_in=[status], limit=1) for status in _QUEUED]
        since = min([page[0].start_time for page in first if page], default=None)
        return 0.0 if since is None else max(0.0, self._store.now() - since)
