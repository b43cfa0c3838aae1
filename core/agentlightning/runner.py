"""Runners: take rollouts from the store, run the agent on them, and say how each ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from agentlightning.emitter import emit_reward
from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.event import AttemptRevoked
from agentlightning.frozen import thaw
from agentlightning.litagent import LitAgent, check_result
from agentlightning.resources import Resource, with_attempt_key
from agentlightning.run.hook import Hook
from agentlightning.run.stop_event import STOP_CHECK_S, StopEvent, is_set, until_set
from agentlightning.run.thread import ThreadStopped, install_group_executor, run_in_thread, thread_group
from agentlightning.store.protocol import LightningStore
from agentlightning.tracer.tracer import Tracer
from agentlightning.types import (
    UNSET,
    AttemptedRollout,
    AttemptFailure,
    AttemptStatus,
    Rollout,
    RolloutMode,
    RolloutRawResult,
    Span,
)

T = TypeVar("T")
logger = logging.getLogger("agentlightning")

_CLAIM_AT_ONCE = 4


class Runner(ABC, Generic[T]):
    """Runs an agent on rollouts. Use it inside ``run_context``."""

    @abstractmethod
    def run_context(
        self,
        *,
        agent: LitAgent[T],
        store: LightningStore,
        hooks: Sequence[Hook] | None = None,
        worker_id: str | None = None,
    ) -> contextlib.AbstractContextManager[Runner[T]]:
        """Gives the runner what it works with, for the duration of the context."""

    @abstractmethod
    async def iter(self, event: StopEvent | None = None) -> None:
        """Takes and runs rollouts until ``event`` is set or the runner's own limit is reached, then drains."""

    @abstractmethod
    async def step(
        self,
        input: T,
        resources: Mapping[str, Resource | str] | None = None,
        mode: RolloutMode | None = None,
        event: StopEvent | None = None,
        *,
        resources_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Runs one task at once, past the queue, and returns the finished rollout.

        Args:
            input: the task.
            resources: published for it as a new snapshot, which becomes the latest.
            mode: of the rollout.
            event: stops it.
            resources_id: instead of ``resources``, a snapshot that is there, or one version of it, as in ``rs-1@3``.
            metadata: of the rollout.
        """


class LitAgentRunner(Runner[T]):
    """Runs many rollouts at once in one event loop: async agents as tasks, synchronous ones in a thread each.

    What an agent raises is kept on the attempt and the runner goes on. An attempt over its time, or one that the store
    has ended, is stopped: a task is cancelled, a thread gets ThreadStopped, of a pool too (``ThreadGroup``).
    """

    def __init__(
        self,
        tracer: Tracer,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        *,
        max_concurrency: int = 16,
        max_abandoned_threads: int = 32,
    ) -> None:
        """Sets up a runner.

        Args:
            tracer: records what the agent does.
            max_rollouts: ``iter`` returns after this many; None means never by itself.
            poll_interval: longest single wait for work, in seconds; new work is seen at once.
            heartbeat_interval: seconds between signs of life to the store.
            max_concurrency: rollouts at once.
            max_abandoned_threads: ``iter`` returns, so that its process can be replaced, once more threads than this
                were left behind by agents that could not be stopped.
        """
        for name, value in (("max_rollouts", max_rollouts), ("max_concurrency", max_concurrency)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value}: at least 1 is needed")
        self.tracer = tracer
        self.max_rollouts = max_rollouts
        self.poll_interval = poll_interval
        self.heartbeat_interval = heartbeat_interval
        self.max_concurrency = max_concurrency
        self.max_abandoned_threads = max_abandoned_threads
        self.worker_id = ""
        self._agent: LitAgent[T] | None = None
        self._store: LightningStore | None = None
        self._hooks: Sequence[Hook] = ()
        self._abandoned: list[threading.Thread] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        """By attempt id."""
        self._unreported: set[str] = set()
        """Those of them whose end the store has not been told of."""
        self._revoked: set[str] = set()
        self._freed = asyncio.Event()
        """Set when a rollout ends."""
        self._background_tasks: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def run_context(
        self,
        *,
        agent: LitAgent[T],
        store: LightningStore,
        hooks: Sequence[Hook] | None = None,
        worker_id: str | None = None,
    ) -> Iterator[LitAgentRunner[T]]:
        self._agent, self._store, self._hooks = agent, store, hooks or ()
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        self.tracer.init()
        self.tracer.init_worker(self.worker_id, store)
        try:
            yield self
        finally:
            self._stop_background_tasks()
            self.tracer.teardown_worker(self.worker_id)
            self.tracer.teardown()
            self._agent = self._store = None

    async def iter(self, event: StopEvent | None = None) -> None:
        store = self._given()[1]
        taken = 0
        self._freed = asyncio.Event()  # of this loop; the runner may be used in several, one after the other
        self._start_background_tasks()
        try:
            while not is_set(event) and not self.is_worn_out:
                limit = min(self.max_concurrency - len(self._running), _CLAIM_AT_ONCE)
                if self.max_rollouts is not None:
                    limit = min(limit, self.max_rollouts - taken)
                    if taken >= self.max_rollouts:
                        break
                if limit < 1:
                    self._freed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(STOP_CHECK_S):
                            await self._freed.wait()
                    continue
                claimed = await until_set(
                    store.dequeue_many_rollouts(limit=limit, worker_id=self.worker_id, timeout=self.poll_interval),
                    event,
                )
                for rollout in claimed or ():
                    taken += 1
                    self._begin(rollout)
            if self._running:
                await asyncio.wait(list(self._running.values()))
        finally:
            for task in list(self._running.values()):
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            self._stop_background_tasks()

    async def step(
        self,
        input: T,
        resources: Mapping[str, Resource | str] | None = None,
        mode: RolloutMode | None = None,
        event: StopEvent | None = None,
        *,
        resources_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        store = self._given()[1]
        if resources is not None:
            if resources_id is not None:
                raise ConfigError(f"step got resources and resources_id={resources_id!r}; give one of them")
            resources_id = (await store.add_resources(resources)).version_id
        rollout = await store.start_rollout(
            input, mode=mode, resources_id=resources_id, metadata=metadata, worker_id=self.worker_id
        )
        self._start_background_tasks()
        await until_set(self._begin(rollout), event)
        finished = await store.get_rollout_by_id(rollout.rollout_id)
        if finished is None:
            raise NotFoundError(f"rollout {rollout.rollout_id} was deleted while it ran")
        return finished

    @property
    def is_worn_out(self) -> bool:
        """Whether ``iter`` returned because too many threads were abandoned; a new process should take over."""
        return self._count_abandoned() > self.max_abandoned_threads

    def _given(self) -> tuple[LitAgent[T], LightningStore]:
        if self._agent is None or self._store is None:
            raise ConfigError(
                "the runner has no agent yet; use it inside: with runner.run_context(agent=..., store=...)"
            )
        return self._agent, self._store

    def _begin(self, rollout: AttemptedRollout) -> asyncio.Task[None]:
        attempt_id = rollout.attempt.attempt_id
        task = asyncio.create_task(self._execute(rollout), name=attempt_id)
        self._running[attempt_id] = task
        self._unreported.add(attempt_id)
        task.add_done_callback(functools.partial(self._ended, attempt_id))
        return task

    def _ended(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        self._running.pop(attempt_id, None)
        self._freed.set()
        self._unreported.discard(attempt_id)
        self._revoked.discard(attempt_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("attempt %s could not be recorded: %s", attempt_id, error, exc_info=error)

    async def _execute(self, rollout: AttemptedRollout) -> None:
        agent, store = self._given()
        attempt_id = rollout.attempt.attempt_id
        status: AttemptStatus = "succeeded"
        failure: AttemptFailure | None = None
        spans: Sequence[Span] = ()
        dropped = 0
        stopped: asyncio.CancelledError | None = None
        limit = asyncio.timeout(rollout.config.timeout_seconds)
        try:
            await self._call_hooks("on_rollout_start", agent=agent, runner=self, rollout=rollout)
            async with self.tracer.trace_context(
                rollout_id=rollout.rollout_id, attempt_id=attempt_id, store=store
            ) as trace:
                try:
                    await self._call_hooks(
                        "on_trace_start", agent=agent, runner=self, tracer=self.tracer, rollout=rollout
                    )
                    async with limit:
                        result = check_result(await self._call_agent(agent, store, rollout))
                    await self._record_result(result, store, rollout)
                finally:
                    await self._call_hooks(
                        "on_trace_end", agent=agent, runner=self, tracer=self.tracer, rollout=rollout
                    )
        except asyncio.CancelledError as error:
            failure = AttemptFailure(type="Cancelled", message="the runner stopped it")
            status, stopped = "failed", error
        except Exception as error:  # isolation point: what an agent raises is data about its attempt
            status, failure = "failed", AttemptFailure.from_exception(error)
            if limit.expired():  # named as the store names it, which may notice first
                what = f"no result within timeout_seconds={rollout.config.timeout_seconds}"
                status, failure = "timeout", failure.model_copy(update={"type": "Timeout", "message": what})
        with contextlib.suppress(UnboundLocalError):  # the trace itself could not be opened
            spans, dropped = trace.spans, trace.dropped
        if attempt_id in self._revoked:  # the store has ended this attempt and knows why
            return
        self._unreported.discard(attempt_id)
        await store.update_attempt(
            rollout.rollout_id,
            attempt_id,
            status=status,
            error=failure,
            spans_dropped=dropped or UNSET,
        )
        await self._call_hooks("on_rollout_end", agent=agent, runner=self, rollout=rollout, spans=spans)
        if stopped is not None:
            raise stopped

    async def _call_agent(self, agent: LitAgent[T], store: LightningStore, rollout: AttemptedRollout) -> Any:
        attempt_id, timeout_s = rollout.attempt.attempt_id, rollout.config.timeout_seconds
        from agentlightning.run import attempt_token  # its libraries are not needed to set a runner up

        key = attempt_token.issue(store.token, rollout.rollout_id, attempt_id, timeout_s)
        resources = with_attempt_key(await _resources_of(store, rollout), key)
        task = cast(T, thaw(rollout.input))
        training = rollout.mode == "train"
        if agent.is_async():
            method = agent.training_rollout_async if training else agent.validation_rollout_async
            with thread_group(on_abandoned=self._abandoned.extend):  # for tools and nodes that do not await
                try:
                    return await method(task, resources, rollout)
                except SystemExit as error:  # it would end the event loop, and with it everybody's rollouts
                    raise RuntimeError(f"SystemExit: {error}") from error
        function = agent.training_rollout if training else agent.validation_rollout
        try:
            return await run_in_thread(
                lambda: function(task, resources, rollout),
                name=f"agent-{rollout.attempt.attempt_id}",
                on_abandoned=self._abandoned.append,
            )
        except ThreadStopped as error:
            raise asyncio.CancelledError from error

    def _count_abandoned(self) -> int:
        self._abandoned[:] = [thread for thread in self._abandoned if thread.is_alive()]
        return len(self._abandoned)

    async def _record_result(self, result: RolloutRawResult, store: LightningStore, rollout: AttemptedRollout) -> None:
        if result is None:
            return
        if isinstance(result, (int, float)):
            emit_reward(float(result))
            return
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        await store.add_many_spans([span.model_copy(update=ids) for span in result])

    async def _call_hooks(self, name: str, **arguments: Any) -> None:
        for hook in self._hooks:
            try:
                await getattr(hook, name)(**arguments)
            except Exception:  # isolation point: a user's hook must not fail the rollout
                logger.exception("hook %s.%s failed", type(hook).__name__, name)

    def _start_background_tasks(self) -> None:
        """Begins to send heartbeats and to obey the store, in the running event loop, unless that is being done."""
        loop = asyncio.get_running_loop()
        if any(not task.done() and task.get_loop() is loop for task in self._background_tasks):
            return
        install_group_executor()
        work = (self._send_heartbeats(), self._follow_revocations())
        self._background_tasks = [loop.create_task(one) for one in work]
        for task in self._background_tasks:
            task.add_done_callback(_report_failure)

    def _stop_background_tasks(self) -> None:
        for task in self._background_tasks:
            if not task.get_loop().is_closed():
                task.cancel()
        self._background_tasks = []

    async def _send_heartbeats(self) -> None:
        store = self._given()[1]
        while True:
            stats = {"running": len(self._running), "abandoned_threads": self._count_abandoned()}
            mine = list(self._unreported)
            try:
                worker = await store.update_worker(self.worker_id, heartbeat_stats=stats, attempt_ids=mine)
            except (StoreError, OSError) as error:
                logger.warning("worker %s could not send its heartbeat: %s", self.worker_id, error)
            else:
                live = mine if worker.attempt_ids is None else worker.attempt_ids
                for attempt_id in set(mine).difference(live):
                    self._revoke(attempt_id, "the store does not know it as running")
            await asyncio.sleep(self.heartbeat_interval)

    async def _follow_revocations(self) -> None:
        async for event in self._given()[1].subscribe(["attempt_revoked"]):
            if isinstance(event, AttemptRevoked):
                self._revoke(event.attempt_id, event.reason)

    def _revoke(self, attempt_id: str, reason: str) -> None:
        task = self._running.get(attempt_id)
        if task is not None and attempt_id in self._unreported:
            logger.info("stopping attempt %s: %s", attempt_id, reason)
            self._revoked.add(attempt_id)
            task.cancel()


async def _resources_of(store: LightningStore, rollout: Rollout) -> Mapping[str, Resource]:
    if rollout.resources_id is None:
        latest = await store.get_latest_resources()
        return {} if latest is None else latest.resources
    update = await store.get_resources_by_id(rollout.resources_id)
    if update is None:
        raise NotFoundError(
            f"rollout {rollout.rollout_id} names resources {rollout.resources_id}, which are not stored"
        )
    return update.resources


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task of the runner failed: %s", error, exc_info=error)
