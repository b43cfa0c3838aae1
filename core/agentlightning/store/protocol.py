"""``LightningStore``: the interface of all stores."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from agentlightning.errors import NotFoundError
from agentlightning.event import Event
from agentlightning.records import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptFailure,
    AttemptStatus,
    EnqueueRolloutRequest,
    FilterLogic,
    Metrics,
    PaginatedResult,
    ReadableSpan,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Run,
    RunStatus,
    SortOrder,
    Span,
    TaskInput,
    Unset,
    Worker,
    WorkerStatus,
    new_resources_id,
)
from agentlightning.resources import Resource, ResourcesUpdate
from agentlightning.store.capabilities import LIVE_SUFFIX, StoreCapabilities
from agentlightning.store.check import checked


class LightningStore(ABC):
    """Rollouts, attempts, spans, versioned resources, workers and metrics of one run.

    Getters return None for an unknown id; writers and ``wait_for_rollouts`` raise NotFoundError. Transitions that the
    lifecycle refuses raise ConflictError and change nothing. Calls that clients repeat (enqueueing with an id, adding
    spans, ending an attempt) are idempotent. Instants are Unix times; durations and timeouts are in seconds.
    """

    run_id: str
    """The run whose queue, latest resources and metrics this object sees."""
    token: str | None = None
    """Authenticates clients of the served store and signs attempt tokens; None if the store is not served."""

    @property
    def tokens(self) -> Sequence[str]:
        """All valid tokens: ``token``, and others while an operator replaces it."""
        return () if self.token is None else (self.token,)

    def __init_subclass__(cls, **options: Any) -> None:
        """Makes the methods of every store check their arguments before they run."""
        super().__init_subclass__(**options)
        for name, declared in vars(LightningStore).items():
            if inspect.isfunction(declared) and (name in vars(cls) or getattr(cls, name) is declared):
                setattr(cls, name, checked(getattr(cls, name), declared))

    def now(self) -> float:
        """Returns the Unix time of the store's database or server, by which attempt tokens expire."""
        return time.time()

    @abstractmethod
    def with_run(self, run_id: str) -> LightningStore:
        """Returns a view of the same store for another run; closing either closes both."""

    @property
    @abstractmethod
    def capabilities(self) -> StoreCapabilities:
        """The optional capabilities of this store."""

    def otlp_traces_endpoint(self) -> str | None:
        """Returns the URL that accepts OTLP/HTTP traces, or None if the store is not served."""
        return None

    @abstractmethod
    async def statistics(self) -> dict[str, float]:
        """Returns the numbers of rollouts, attempts, spans, resources and workers, and ``uptime`` in seconds."""

    @abstractmethod
    async def close(self) -> None:
        """Releases connections and tasks. Stored data is kept."""

    # --- rollouts ---

    @abstractmethod
    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        """Creates a rollout with its first attempt, bypassing the queue."""

    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        priority: int = 0,
        rollout_id: str | None = None,
    ) -> Rollout:
        """Queues one rollout, like ``enqueue_many_rollouts``; ``resources_id=None`` pins the newest snapshot."""
        arguments = {"input": input, "mode": mode, "resources_id": resources_id, "config": config, "priority": priority}
        request = EnqueueRolloutRequest.model_validate({**arguments, "metadata": metadata, "rollout_id": rollout_id})
        return (await self.enqueue_many_rollouts([request]))[0]

    @abstractmethod
    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Queues rollouts in order, all or none; a known ``rollout_id`` returns the stored rollout.

        Raises NotFoundError for an unknown ``resources_id``, ConflictError for a ``rollout_id`` of another run.
        """

    async def dequeue_rollout(self, worker_id: str | None = None, *, timeout: float = 0) -> AttemptedRollout | None:
        """Takes the first queued rollout and creates its attempt in one step; waits up to ``timeout`` for one."""
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id, timeout=timeout)
        return claimed[0] if claimed else None

    @abstractmethod
    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0
    ) -> Sequence[AttemptedRollout]:
        """Takes up to ``limit`` queued rollouts; waits up to ``timeout`` for the first.

        The highest ``priority`` comes first; rollouts of the same priority come in the order in which they were queued.
        If the caller is cancelled, rollouts that were being claimed for it go back to the queue. Closing the store ends
        the wait with an empty result.
        """

    @abstractmethod
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Starts another attempt of a rollout, bypassing the queue."""

    @abstractmethod
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        metadata: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        start_after: float | None = None,
        start_before: float | None = None,
        cursor: str | None = None,
    ) -> PaginatedResult[Rollout]:
        """Finds rollouts of this run (or ``run_id``); items are AttemptedRollout where an attempt exists.

        ``filter_logic`` combines the filters on status and id; run, metadata and times must always match. ``sort_by``
        can be any field of Rollout; None sorts first.
        """

    @abstractmethod
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """Returns the rollout, with its latest attempt if it has one."""

    @abstractmethod
    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: Mapping[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        """Changes the given fields. A status that ends the rollout or queues it again ends its live attempt too."""

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        """Ends a rollout that has not finished; its runner stops the agent.

        The live attempt ends as failed with an error of type ``Cancelled``. Cancelling twice is harmless; a rollout
        that has succeeded or failed raises ConflictError.
        """
        return await self.update_rollout(rollout_id, status="cancelled")

    @abstractmethod
    async def retry_rollout(self, rollout_id: str) -> Rollout:
        """Queues a failed or cancelled rollout again."""

    @abstractmethod
    async def delete_rollouts(
        self,
        rollout_ids: Sequence[str] | None = None,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        ended_before: float | None = None,
        keep: int | None = None,
        limit: int | None = None,
    ) -> int:
        """Removes rollouts that have ended, with their attempts and spans; returns how many.

        Conditions are applied in slices, between which others write; if the call is cancelled, a part is removed.

        Args:
            rollout_ids: the rollouts; unknown ids are ignored. None: all of this run that match the other arguments.
            status_in: failed, succeeded or cancelled.
            ended_before: Unix time before which the rollouts ended.
            keep: how many of the newest (with a status in ``status_in``) to keep, in the order of enqueueing.
            limit: how many to remove at most in this call, the oldest first; a call that returns 0 had none to remove.

        Raises:
            ConfigError: no argument, or ids together with another argument.
            ConflictError: one of the ids has not ended; nothing is removed.
        """

    @abstractmethod
    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        """Returns the rollouts that ended within ``timeout`` (None waits for all), in the order of ``rollout_ids``.

        A rollout whose id was given twice is returned twice, an unknown id raises NotFoundError; rollouts that are
        deleted during the wait are omitted. If a rollout is retried while another one still runs, its next
        end is awaited. Closing the store ends the wait and returns the rollouts that have ended.
        """

    # --- attempts ---

    @abstractmethod
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Returns the attempt with the highest ``sequence_id``."""

    @abstractmethod
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Returns the attempts of a rollout."""

    @abstractmethod
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: Mapping[str, Any] | Unset | None = UNSET,
        *,
        error: AttemptFailure | Unset | None = UNSET,
        spans_dropped: int | Unset = UNSET,
        reward: float | Unset | None = UNSET,
    ) -> Attempt:
        """Changes the given fields; the status of the latest attempt drives the rollout.

        An ended attempt keeps its status: a later result is stored as ``late_status``, and its error only if the
        attempt has no error. Giving a live attempt another worker moves its lease to that worker.
        Raises ConflictError, and changes nothing, if the lifecycle refuses the status.
        """

    @abstractmethod
    async def release_attempt(self, rollout_id: str, attempt_id: str) -> Rollout:
        """Gives back a claim that its worker has not started; the rollout is queued again immediately.

        The attempt ends as unresponsive with an error of type ``Released``. Releasing an ended attempt is harmless;
        releasing a running attempt raises ConflictError.
        """

    # --- spans ---

    async def add_span(self, span: Span) -> Span | None:
        """Stores a span; returns None if it is already stored."""
        stored = await self.add_many_spans([span])
        return stored[0] if stored else None

    @abstractmethod
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Stores spans in order, except stored ones; stores none and raises NotFoundError if an attempt is unknown."""

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Stores a finished OpenTelemetry span."""
        return await self.add_span(Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Reserves the next span number of an attempt."""
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    @abstractmethod
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """Reserves a span number for each pair; an attempt may be "latest", and may occur several times."""

    @abstractmethod
    async def query_spans(
        self,
        rollout_id: str | None,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        rollout_id_in: Sequence[str] | None = None,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        run_id: str | None = None,
        start_after: float | None = None,
        start_before: float | None = None,
        cursor: str | None = None,
    ) -> PaginatedResult[Span]:
        """Finds spans of one rollout or, with ``rollout_id=None``, of all rollouts of a run or of ``rollout_id_in``.

        ``filter_logic`` combines ``rollout_id_in`` and the filters on trace, span, parent and name; others must match.
        Sequence numbers do not order the spans of different attempts: across rollouts, and with a cursor,
        ``sort_by="sequence_id"`` therefore means the order in which the spans were stored.
        """

    @abstractmethod
    async def poll_new_spans(self, cursor: str | None = None, *, limit: int = 1000) -> PaginatedResult[Span]:
        """Returns this run's spans since a cursor (None: all), each once; the result's cursor is for the next call."""

    # --- resources ---

    async def add_resources(self, resources: Mapping[str, Resource | str]) -> ResourcesUpdate:
        """Publishes a new snapshot, which becomes the latest; a plain str is an f-string PromptTemplate."""
        return await self.update_resources(new_resources_id(), resources)

    @abstractmethod
    async def update_resources(self, resources_id: str, resources: Mapping[str, Resource | str]) -> ResourcesUpdate:
        """Publishes the next version of a snapshot (version 1 of a new one), which becomes the latest.

        Raises ConfigError for an empty id, the id of one version, another run's snapshot, or a value that is not a
        resource.
        """

    @abstractmethod
    async def get_resources_by_id(self, resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        """Returns a version of a snapshot; None means the newest.

        A ``resources_id`` may also name one version, as in ``rs-1@3`` (``ResourcesUpdate.version_id``), here and when
        rollouts are queued: a rollout that is queued with it always gets that version.
        """

    async def promote(self, resources_id: str, version: int | None = None) -> ResourcesUpdate:
        """Makes a version of a snapshot, by default its newest, the latest resources of this run, unless it is already.

        It is published again: as the next version of the snapshot, or as a new snapshot if it belongs to another run.
        Raises NotFoundError for an unknown snapshot or version.
        """
        chosen = await self.get_resources_by_id(resources_id, version)
        if chosen is None:
            shown = resources_id if version is None else f"{resources_id}@{version}"
            raise NotFoundError(f"no resources {shown!r} in this store")
        if chosen.run_id != self.run_id:
            return await self.add_resources(chosen.resources)
        latest = await self.get_latest_resources()
        if latest is not None and latest.version_id == chosen.version_id:
            return latest
        return await self.update_resources(chosen.resources_id, chosen.resources)

    async def rollback(self, resources_id: str, version: int) -> ResourcesUpdate:
        """Publishes an earlier version as the next one, which becomes the latest; NotFoundError if it is unknown."""
        earlier = await self.get_resources_by_id(resources_id, version)
        if earlier is None:
            raise NotFoundError(f"no version {version!r} of resources {resources_id!r} in this store")
        return await self.update_resources(earlier.resources_id, earlier.resources)

    @abstractmethod
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Returns the resources that were published last in this run."""

    async def get_optimized_resources(self) -> ResourcesUpdate | None:
        """Returns the promoted resources, which are the latest of this run; before there are any, the candidate."""
        candidates = self.with_run(self.run_id + LIVE_SUFFIX)
        return await self.get_latest_resources() or await candidates.get_latest_resources()

    @abstractmethod
    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Returns every version that was published in this run, oldest first unless sorted."""

    # --- workers ---

    @abstractmethod
    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Returns the workers seen so far."""

    @abstractmethod
    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """Returns a worker by id."""

    @abstractmethod
    async def update_worker(
        self,
        worker_id: str,
        heartbeat_stats: Mapping[str, Any] | Unset | None = UNSET,
        attempt_ids: Sequence[str] | Unset | None = UNSET,
    ) -> Worker:
        """Records a heartbeat: creates the worker if it is new and renews the leases of its attempts.

        With ``attempt_ids`` a worker reports the attempts that it runs. From then on its heartbeats renew only their
        leases, so a claim whose response was lost ends after a lease. The returned worker lists the attempts that are
        still live, so that the worker can stop all other ones. None undoes this: heartbeats renew all leases again.
        """

    @abstractmethod
    async def end_worker(self, worker_id: str) -> int:
        """Marks a worker as dead and ends its live attempts as if their leases had expired; returns how many.

        The worker gets no more work under this id: claiming raises ConflictError. If it is alive after all, its results
        are kept as late results.
        """

    # --- runs, metrics, events ---

    @abstractmethod
    async def create_run(
        self,
        name: str,
        *,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Run:
        """Creates a run, or returns the one with this ``run_id`` (default: the run of this store)."""

    @abstractmethod
    async def get_run_by_id(self, run_id: str) -> Run | None:
        """Returns a run by id."""

    @abstractmethod
    async def update_run(self, run_id: str, status: RunStatus) -> Run:
        """Sets the status of a run, back to running when it is resumed; raises NotFoundError for an unknown run."""

    @abstractmethod
    async def query_runs(self, *, limit: int = -1, offset: int = 0) -> PaginatedResult[Run]:
        """Returns the runs of this database, oldest first."""

    async def find_open_runs(self) -> Sequence[str]:
        """Returns the ids of the runs with queued or running rollouts; this default returns all that have not ended."""
        return [run.run_id for run in await self.query_runs() if run.status == "running"]

    @abstractmethod
    async def add_metrics(self, step: int, values: Mapping[str, float]) -> Metrics:
        """Records metrics of a step of this run; a repeated step adds values, or replaces those that it repeats."""

    @abstractmethod
    async def query_metrics(self, *, limit: int = -1, offset: int = 0) -> PaginatedResult[Metrics]:
        """Returns the metrics of this run in the order of their steps."""

    @abstractmethod
    def subscribe(self, kinds: Sequence[str] | None = None, *, every_run: bool = False) -> AsyncIterator[Event]:
        """Yields the events of this run from the first ``anext`` on, until the iterator or the store is closed.

        With ``every_run`` it yields the events of all runs of the database.

        Raises ConfigError for an unknown kind, and StoreError if the reader is too slow and events were dropped.
        """
