"""Runners: claim rollouts from the store, run the agent on them and report the result of each attempt."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from agentlightning.emitter import emit_reward
from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StorageFullError, StoreError
from agentlightning.event import AttemptRevoked
from agentlightning.frozen import thaw
from agentlightning.litagent import LitAgent, check_result, running_in, to_spans, wrap
from agentlightning.plugin.settings import require_least
from agentlightning.records import (
    UNSET,
    AttemptedRollout,
    AttemptFailure,
    AttemptStatus,
    Rollout,
    RolloutMode,
    RolloutRawResult,
    Span,
)
from agentlightning.resources import Resource, resolve_secrets, with_attempt_key
from agentlightning.reward import find_final_reward
from agentlightning.run.agent_call import call_agent, guard_loop, guarded_process
from agentlightning.run.heartbeat import Heartbeats
from agentlightning.run.proxies import bypass_proxies
from agentlightning.run.thread import STOP_CHECK_S, EscapedError, StopEvent, install_group_executor, until_set
from agentlightning.store.lifecycle import counts_as_lost
from agentlightning.store.protocol import LightningStore
from agentlightning.tracer.tracer import Trace, Tracer

T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger("agentlightning")

_CLAIM_AT_ONCE = 4
_GOODBYE_S = 1.0
_GIVE_UP_S = 120.0
"""How long an attempt waits for a store that is away; its spans do too."""
_MAX_ABANDONED = 32
"""Once more threads than this belong to agents that could not be stopped, the process should be replaced."""
_DEATHS_BEFORE_ALONE = 2
"""After this many workers have died before its first span, a rollout runs alone, so that it cannot end others."""


class Hook:
    """Callbacks around rollouts, in the runner's process. Override what you need; errors in a hook are only logged."""

    async def on_rollout_start(self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: AttemptedRollout) -> None:
        """Called after a rollout is claimed, before anything runs."""

    async def on_trace_start(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """Called when the attempt's trace is open: spans made here belong to it."""

    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """Called after the agent has returned or failed, while the trace is still open."""

    async def on_rollout_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: Rollout, spans: Sequence[Span]
    ) -> None:
        """Called after the attempt has ended and its spans are stored."""


class Runner(ABC, Generic[T]):
    """Runs an agent on rollouts. Use it inside ``run_context``."""

    @abstractmethod
    def run_context(
        self, *, agent: Any, store: LightningStore, hooks: Sequence[Hook] | None = None, worker_id: str | None = None
    ) -> contextlib.AbstractContextManager[Runner[T]]:
        """Sets the runner's store and agent, which is anything that ``agl.wrap`` takes, while the context is open."""

    @abstractmethod
    async def iter(self, event: StopEvent | None = None) -> None:
        """Claims and runs rollouts until ``event`` is set or the runner's limit is reached, then drains."""

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
        """Runs one task immediately, bypassing the queue, and returns the finished rollout. ``event`` stops it.

        ``resources`` are published as a new snapshot, which becomes the latest; ``resources_id`` names a stored
        snapshot instead, or one version of it such as ``rs-1@3``.
        """


class LitAgentRunner(Runner[T]):
    """Runs many rollouts concurrently in one event loop: async agents as tasks, synchronous ones in a thread each.

    An exception of the agent is stored on the attempt and the runner continues. An attempt that exceeds its timeout, or
    that the store has ended, is stopped: its task is cancelled, and ``ThreadStopped`` is raised in its threads.
    """

    def __init__(
        self,
        tracer: Tracer,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        *,
        max_concurrency: int = 16,
    ) -> None:
        """Sets up a runner.

        Args:
            tracer: records the agent's spans.
            max_rollouts: ``iter`` returns after this many rollouts; None means no limit.
            poll_interval: longest single wait for work, in seconds; new work is noticed immediately.
            heartbeat_interval: seconds between heartbeats.
            max_concurrency: number of concurrent rollouts.
        """
        require_least(1, max_rollouts=max_rollouts, max_concurrency=max_concurrency)
        self.tracer = tracer
        self.max_rollouts = max_rollouts
        self.poll_interval = poll_interval
        self.heartbeat_interval = heartbeat_interval
        self.max_concurrency = max_concurrency

        self.worker_id = ""
        self.trainer: Any = None  # the ``Trainer`` that started this runner, if one did
        self._agent: LitAgent[T] | None = None
        self._store: LightningStore | None = None
        self._hooks: Sequence[Hook] = ()
        self._abandoned: list[threading.Thread] = []
        self._running: dict[str, asyncio.Task[None]] = {}  # the running tasks by attempt id
        self._unreported: set[str] = set()
        """Ids of the running attempts whose end is not yet reported to the store."""
        self._revoked: set[str] = set()
        self._slot_freed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._heartbeats: Heartbeats | None = None

    @contextlib.contextmanager
    def run_context(
        self, *, agent: Any, store: LightningStore, hooks: Sequence[Hook] | None = None, worker_id: str | None = None
    ) -> Iterator[LitAgentRunner[T]]:
        if self._agent is not None:
            raise ConfigError("this runner is in use; each runner of a process needs its own object: give the class")
        bypass_proxies()
        self._agent, self._store, self._hooks = wrap(agent), store, hooks or ()
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        with contextlib.ExitStack() as stack:
            stack.callback(vars(self).update, _agent=None, _store=None)
            stack.enter_context(guarded_process())
            self.tracer.init()
            stack.callback(self.tracer.teardown)
            self.tracer.init_worker(self.worker_id, store)
            stack.callback(self.tracer.teardown_worker, self.worker_id)
            stack.callback(self._stop_background_tasks)
            yield self

    async def iter(self, event: StopEvent | None = None) -> None:
        store = self._given()[1]
        left = math.inf if self.max_rollouts is None else self.max_rollouts
        self._slot_freed = asyncio.Event()  # belongs to this loop; a runner may be used in several loops in turn
        self._start_background_tasks()
        runs_alone = is_store_away = False
        try:
            while left > 0 and (event is None or not event.is_set()) and not self.is_worn_out:
                n_free = (0 if self._running else 1) if runs_alone else self.max_concurrency - len(self._running)
                limit = int(min(n_free, _CLAIM_AT_ONCE, left))
                if limit < 1:
                    self._slot_freed.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._slot_freed.wait(), STOP_CHECK_S)
                    continue
                claim = store.dequeue_many_rollouts(limit=limit, worker_id=self.worker_id, timeout=self.poll_interval)
                try:
                    claimed = await until_set(claim, event) or ()
                except (StoreError, OSError) as error:
                    if not self._running and not isinstance(error, StorageFullError):
                        raise
                    if not is_store_away:  # the rollouts in flight may end when it is back
                        logger.warning("worker %s cannot claim rollouts and tries again: %s", self.worker_id, error)
                    is_store_away = True
                    await until_set(asyncio.sleep(self.poll_interval), event)
                    continue
                is_store_away = False
                suspects = [rollout for rollout in claimed if await self._is_suspect(rollout)]
                runs_alone = bool(suspects)
                for rollout in claimed:
                    if rollout in suspects and (self._running or len(claimed) > 1):
                        with contextlib.suppress(NotFoundError, ConflictError):  # it has ended, or was deleted
                            await store.release_attempt(rollout.rollout_id, rollout.attempt.attempt_id)
                    else:
                        left -= 1
                        self._begin(rollout)
            if self._running:
                await asyncio.wait(list(self._running.values()))
        finally:
            for task in list(self._running.values()):
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            self._stop_background_tasks()
            with contextlib.suppress(StoreError, OSError, TimeoutError):  # the store may be gone already
                async with asyncio.timeout(_GOODBYE_S):
                    await store.update_worker(self.worker_id, heartbeat_stats={"stopped": True}, attempt_ids=[])

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
        """Whether too many threads were abandoned, so that ``iter`` returns and a new process should take over."""
        self._abandoned[:] = [thread for thread in self._abandoned if thread.is_alive()]
        return len(self._abandoned) > _MAX_ABANDONED

    def _given(self) -> tuple[LitAgent[T], LightningStore]:
        if self._agent is None or self._store is None:
            raise ConfigError("the runner has no agent; use it in: with runner.run_context(agent=..., store=...)")
        return self._agent, self._store

    async def _is_suspect(self, rollout: AttemptedRollout) -> bool:
        """Whether enough workers died during earlier attempts of a rollout."""
        if rollout.attempt.sequence_id <= _DEATHS_BEFORE_ALONE:
            return False
        attempts = (await self._given()[1].query_attempts(rollout.rollout_id)).items
        return sum(map(counts_as_lost, attempts)) >= _DEATHS_BEFORE_ALONE

    def _begin(self, rollout: AttemptedRollout) -> asyncio.Task[None]:
        attempt_id = rollout.attempt.attempt_id
        task = asyncio.create_task(self._execute(rollout), name=attempt_id)
        self._running[attempt_id] = task
        self._unreported.add(attempt_id)
        task.add_done_callback(functools.partial(self._ended, attempt_id))
        return task

    def _ended(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        self._running.pop(attempt_id, None)
        self._slot_freed.set()
        self._unreported.discard(attempt_id)
        self._revoked.discard(attempt_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("attempt %s could not be recorded: %s", attempt_id, error, exc_info=error)

    async def _execute(self, rollout: AttemptedRollout) -> None:
        agent, store = self._given()
        attempt_id = rollout.attempt.attempt_id
        status: AttemptStatus = "succeeded"
        failure: AttemptFailure | None = None
        trace = Trace()
        returned: Sequence[Span] = ()
        stopped: asyncio.CancelledError | None = None
        limit = asyncio.timeout(rollout.config.timeout_seconds)
        call_hooks = functools.partial(self._call_hooks, agent=agent, runner=self, rollout=rollout)
        try:
            running_in.set(self)  # in this task only
            await call_hooks("on_rollout_start")
            context = self.tracer.trace_context(rollout_id=rollout.rollout_id, attempt_id=attempt_id, store=store)
            async with context as trace:
                try:
                    await call_hooks("on_trace_start", tracer=self.tracer)
                    async with limit:
                        result = check_result(await self._call_agent(agent, store, rollout))
                    returned = await self._record_result(result, rollout)
                finally:
                    await call_hooks("on_trace_end", tracer=self.tracer)
        except asyncio.CancelledError as error:
            failure = AttemptFailure(type="Cancelled", message="the runner stopped it")
            status, stopped = "failed", error
        except EscapedError as error:
            status, failure = "failed", AttemptFailure.from_exception(error.original)
        except Exception as error:  # isolation point: an exception of the agent is data about its attempt
            status, failure = "failed", AttemptFailure.from_exception(error)
            if limit.expired():  # worded like the error of the store, which may notice first
                message = f"no result within timeout_seconds={rollout.config.timeout_seconds}"
                status, failure = "timeout", failure.model_copy(update={"type": "Timeout", "message": message})
        if attempt_id in self._revoked:  # the store has already ended this attempt and stored the reason
            await call_hooks("on_rollout_end", spans=trace.spans)
            return
        report = functools.partial(
            store.update_attempt,
            rollout.rollout_id,
            attempt_id,
            status=status,
            error=failure,
            spans_dropped=trace.dropped or UNSET,
            reward=find_final_reward((*trace.spans, *returned)),
        )
        await self._with_patience(report, attempt_id, is_end=True)
        await call_hooks("on_rollout_end", spans=trace.spans)
        if stopped is not None:
            raise stopped

    async def _call_agent(self, agent: LitAgent[T], store: LightningStore, rollout: AttemptedRollout) -> Any:
        from agentlightning.run import attempt_token  # imports cryptography that setting up a runner does not need

        attempt_id, timeout_s = rollout.attempt.attempt_id, rollout.config.timeout_seconds
        key = attempt_token.issue(store.token, rollout.rollout_id, attempt_id, store.now(), timeout_s)
        found = await self._with_patience(functools.partial(_find_resources, store, rollout), attempt_id)
        resources = with_attempt_key(resolve_secrets(found), key)
        task = cast(T, thaw(rollout.input))
        return await call_agent(agent, task, resources, rollout, self._abandoned)

    async def _record_result(self, result: RolloutRawResult, rollout: AttemptedRollout) -> Sequence[Span]:
        """Emits a returned reward, or stores returned spans and returns them."""
        if isinstance(result, Sequence):
            store, spans = self._given()[1], to_spans(result, rollout)
            return await self._with_patience(functools.partial(store.add_many_spans, spans), rollout.attempt.attempt_id)
        if result is not None:
            emit_reward(float(result))
        return ()

    async def _with_patience(self, call: Callable[[], Awaitable[R]], attempt_id: str, *, is_end: bool = False) -> R:
        """Makes a call for an attempt again while the disk of the store is full, or the store is away.

        Meanwhile, heartbeats renew the lease of the attempt. ``is_end``: after the call, the attempt has ended.
        """
        gives_up_at, has_failed = time.monotonic() + _GIVE_UP_S, False
        while True:
            if is_end:  # a heartbeat that the store answers later does not list it
                self._unreported.discard(attempt_id)
            try:
                return await call()
            except (NotFoundError, ConflictError):
                raise
            except (StoreError, OSError) as error:
                if not isinstance(error, StorageFullError) and time.monotonic() > gives_up_at:
                    raise
                if not has_failed:
                    logger.warning("attempt %s waits for the store: %s", attempt_id, error)
                has_failed = True
            self._unreported.add(attempt_id)
            await asyncio.sleep(self.poll_interval)

    async def _call_hooks(self, name: str, **arguments: Any) -> None:
        for hook in self._hooks:
            try:
                await getattr(hook, name)(**arguments)
            except Exception:  # isolation point: an error in a user's hook must not fail the rollout
                logger.exception("hook %s.%s failed", type(hook).__name__, name)

    def _start_background_tasks(self) -> None:
        """Starts heartbeats and the watch for revoked attempts in the running event loop, unless they run already."""
        loop = asyncio.get_running_loop()
        if self._heartbeats is not None and self._heartbeats.is_running and self._heartbeats.loop is loop:
            return
        self._stop_background_tasks()
        install_group_executor()
        guard_loop()
        self._heartbeats = Heartbeats(functools.partial(self._beat, loop), self.heartbeat_interval, self.worker_id)
        self._watch = loop.create_task(self._watch_revocations())
        self._watch.add_done_callback(_report_failure)

    def _stop_background_tasks(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.stop()
        if self._watch is not None and not self._watch.get_loop().is_closed():
            self._watch.cancel()
        self._heartbeats = self._watch = None

    async def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sends one heartbeat from the heartbeat thread; ``loop`` is the runner's event loop."""
        n_abandoned = sum(thread.is_alive() for thread in tuple(self._abandoned))
        stats = {"running": len(self._running), "abandoned_threads": n_abandoned}
        mine = list(self._unreported)
        try:
            worker = await self._given()[1].update_worker(self.worker_id, heartbeat_stats=stats, attempt_ids=mine)
        except (StoreError, OSError) as error:
            logger.warning("worker %s could not send its heartbeat: %s", self.worker_id, error)
            return
        for attempt_id in set(mine).difference(mine if worker.attempt_ids is None else worker.attempt_ids):
            with contextlib.suppress(RuntimeError):  # the runner's loop is closed
                loop.call_soon_threadsafe(self._revoke, attempt_id, "the store does not list it as running")

    async def _watch_revocations(self) -> None:
        while True:
            try:
                async for event in self._given()[1].subscribe(["attempt_revoked"]):
                    if isinstance(event, AttemptRevoked):
                        self._revoke(event.attempt_id, event.reason)
                return  # the store is closed
            except (StoreError, OSError) as error:  # until then, heartbeats find revoked attempts
                logger.warning("worker %s watches for revoked attempts again: %s", self.worker_id, error)
                await asyncio.sleep(1.0)

    def _revoke(self, attempt_id: str, reason: str) -> None:
        task = self._running.get(attempt_id)
        if task is not None and attempt_id in self._unreported:
            logger.info("stopping attempt %s: %s", attempt_id, reason)
            self._revoked.add(attempt_id)
            task.cancel()


async def _find_resources(store: LightningStore, rollout: Rollout) -> Mapping[str, Resource]:
    """Returns the resources of a rollout: those that it names, else the latest."""
    if rollout.resources_id is None:
        update = await store.get_latest_resources()
        return {} if update is None else update.resources
    update = await store.get_resources_by_id(rollout.resources_id)
    if update is None:
        raise NotFoundError(f"rollout {rollout.rollout_id}: the resources {rollout.resources_id} are not stored")
    return update.resources


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the runner's watch for revoked attempts failed: %s", error, exc_info=error)
