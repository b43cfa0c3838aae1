"""Compares a store with a simple model: Hypothesis searches for a sequence of calls after which they differ.

The model is the table of the lifecycle, a list for the queue and dicts. It shares no code, and so no bugs, with
``lifecycle.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.records import AttemptedRollout, AttemptStatus, EnqueueRolloutRequest, RolloutConfig, RolloutStatus
from agentlightning.records import Span as StoredSpan
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.primitives import soon

T = TypeVar("T")
Reopen = Callable[[], Awaitable[LightningStore]]

SEARCH: Final = settings(
    max_examples=24, stateful_step_count=30, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
"""Settings of the search, which takes about two seconds for a store behind HTTP."""

_MOVES: Final[dict[str, set[str]]] = {
    "queuing": {"preparing", "cancelled"},
    "requeuing": {"preparing", "cancelled"},
    "preparing": {"running", "succeeded", "failed", "requeuing", "cancelled"},
    "running": {"succeeded", "failed", "requeuing", "cancelled"},
    "failed": set(),
    "cancelled": set(),
    "succeeded": set(),
}
_ATTEMPT_ENDS: Final = ("succeeded", "failed", "timeout", "unresponsive")
_CONFIGS: Final = (
    RolloutConfig(),
    RolloutConfig(max_attempts=2, retry_condition=["failed", "timeout"]),
    RolloutConfig(max_attempts=3, retry_condition=["unresponsive", "failed"]),
)
_numbers = itertools.count()

picks = st.integers(0, 9)
"""Numbers that choose a rollout or attempt of the model."""
workers = st.sampled_from([None, "worker-1", "worker-2"])


@dataclass
class _Attempt:
    attempt_id: str
    worker_id: str | None
    status: str = "preparing"
    late: str | None = None
    spans: list[str] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        return self.status in ("preparing", "running")


@dataclass
class _Rollout:
    rollout_id: str
    input: int
    config: RolloutConfig
    resources_id: str | None
    priority: int = 0
    status: str = "queuing"
    attempts: list[_Attempt] = field(default_factory=list)


@dataclass
class _Subject:
    """The tested store, which all examples share."""

    store: LightningStore
    loop: asyncio.AbstractEventLoop
    reopen: Reopen | None


class StoreMachine(RuleBasedStateMachine):
    """Calls a store and its model. Each example uses a new run, so the store appears empty."""

    subject: ClassVar[_Subject]

    def __init__(self) -> None:
        super().__init__()
        self.run_id = f"model-{next(_numbers)}"
        self.store = self.subject.store.with_run(self.run_id)
        self.rollouts: dict[str, _Rollout] = {}
        self.queue: list[str] = []
        self.versions: dict[str, list[str]] = {}
        self.latest: str | None = None

    # --- transitions of the model ---

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(soon(call), self.subject.loop).result()

    def refused(self, call: Coroutine[Any, Any, object], error: type[Exception] = ConflictError) -> None:
        try:
            result = self.do(call)
        except error:
            return
        raise AssertionError(f"{call} should have raised {error.__name__}, it returned {result!r}")

    def pick(self, number: int) -> _Rollout:
        return list(self.rollouts.values())[number % len(self.rollouts)]

    def pick_attempt(self, number: int, which: int) -> tuple[_Rollout, _Attempt]:
        tried = [rollout for rollout in self.rollouts.values() if rollout.attempts]
        rollout = tried[number % len(tried)]
        return rollout, rollout.attempts[which % len(rollout.attempts)]

    def move(self, rollout: _Rollout, status: str) -> None:
        was_queued, is_queued = (value in ("queuing", "requeuing") for value in (rollout.status, status))
        rollout.status = status
        if was_queued and not is_queued:
            self.queue.remove(rollout.rollout_id)
        if is_queued and not was_queued:
            self.enter_queue(rollout)

    def enter_queue(self, rollout: _Rollout) -> None:
        self.queue.append(rollout.rollout_id)
        self.queue.sort(key=lambda rollout_id: -self.rollouts[rollout_id].priority)  # keeps the order of equal ones

    def begin(self, rollout: _Rollout, begun: AttemptedRollout, worker_id: str | None) -> None:
        self.move(rollout, "preparing")
        rollout.attempts.append(_Attempt(begun.attempt.attempt_id, worker_id))
        assert begun.rollout_id == rollout.rollout_id
        assert (begun.status, begun.attempt.sequence_id) == ("preparing", len(rollout.attempts))
        assert begun.attempt.worker_id == worker_id

    def end(self, rollout: _Rollout, attempt: _Attempt, status: str) -> None:
        attempt.status = status
        if rollout.status not in ("preparing", "running"):
            return
        if status in ("running", "succeeded"):
            self.move(rollout, status)
        elif status in rollout.config.retry_condition and len(rollout.attempts) < rollout.config.max_attempts:
            self.move(rollout, "requeuing")
        else:
            self.move(rollout, "failed")

    def lose(self, rollout: _Rollout, attempt: _Attempt) -> None:
        if attempt.status == "preparing" and rollout.status == "preparing":
            attempt.status = "unresponsive"
            self.move(rollout, "requeuing")
        else:
            self.end(rollout, attempt, "unresponsive")

    # --- calls ---

    @rule(priorities=st.lists(st.integers(-1, 1), min_size=1, max_size=3), config=st.sampled_from(_CONFIGS))
    def enqueue(self, priorities: list[int], config: RolloutConfig) -> None:
        requests = [
            EnqueueRolloutRequest(
                input=next(_numbers), config=config, rollout_id=f"{self.run_id}-{next(_numbers)}", priority=priority
            )
            for priority in priorities
        ]
        for request, queued in zip(requests, self.do(self.store.enqueue_many_rollouts(requests)), strict=True):
            assert (queued.rollout_id, queued.status) == (request.rollout_id, "queuing")
            rollout = _Rollout(queued.rollout_id, request.input, config, self.latest, request.priority)
            self.rollouts[queued.rollout_id] = rollout
            self.enter_queue(rollout)

    @precondition(lambda self: self.rollouts)
    @rule(number=picks)
    def enqueue_again(self, number: int) -> None:
        rollout = self.pick(number)
        request = EnqueueRolloutRequest(input="another", rollout_id=rollout.rollout_id)
        (known,) = self.do(self.store.enqueue_many_rollouts([request]))
        assert (known.input, known.status) == (rollout.input, rollout.status)

    @rule(limit=st.integers(1, 3), worker_id=workers)
    def dequeue(self, limit: int, worker_id: str | None) -> None:
        claimed = self.do(self.store.dequeue_many_rollouts(limit=limit, worker_id=worker_id))
        assert [rollout.rollout_id for rollout in claimed] == self.queue[:limit]
        for item in claimed:
            self.begin(self.rollouts[item.rollout_id], item, worker_id)

    @rule(worker_id=workers)
    def start_rollout(self, worker_id: str | None) -> None:
        number = next(_numbers)
        begun = self.do(self.store.start_rollout(number, worker_id=worker_id))
        rollout = _Rollout(begun.rollout_id, number, RolloutConfig(), self.latest, status="preparing")
        rollout.attempts.append(_Attempt(begun.attempt.attempt_id, worker_id))
        self.rollouts[begun.rollout_id] = rollout

    @precondition(lambda self: self.rollouts)
    @rule(number=picks, worker_id=workers)
    def start_attempt(self, number: int, worker_id: str | None) -> None:
        rollout = self.pick(number)
        call = self.store.start_attempt(rollout.rollout_id, worker_id)
        if rollout.status in ("queuing", "requeuing", "failed", "cancelled"):
            self.begin(rollout, self.do(call), worker_id)
        else:
            self.refused(call)

    @precondition(lambda self: any(rollout.attempts for rollout in self.rollouts.values()))
    @rule(number=picks, which=picks, new=st.booleans())
    def add_span(self, number: int, which: int, new: bool) -> None:
        rollout, attempt = self.pick_attempt(number, which)
        is_new = new or not attempt.spans
        span_id = f"{next(_numbers):016x}" if is_new else attempt.spans[which % len(attempt.spans)]
        span = StoredSpan.from_attributes(
            attributes={"run": self.run_id},
            rollout_id=rollout.rollout_id,
            attempt_id=attempt.attempt_id,
            span_id=span_id,
        )
        stored = self.do(self.store.add_span(span))
        if not is_new:
            assert stored is None
            return
        attempt.spans.append(span_id)
        assert stored is not None
        assert stored.sequence_id == len(attempt.spans)
        if attempt.status == "preparing":
            attempt.status = "running"
            if rollout.status == "preparing":
                self.move(rollout, "running")

    @precondition(lambda self: any(rollout.attempts for rollout in self.rollouts.values()))
    @rule(number=picks, which=picks, status=st.sampled_from(["preparing", "running", *_ATTEMPT_ENDS]))
    def update_attempt(self, number: int, which: int, status: AttemptStatus) -> None:
        rollout, attempt = self.pick_attempt(number, which)
        call = self.store.update_attempt(rollout.rollout_id, attempt.attempt_id, status=status)
        if status == attempt.status:
            self.do(call)
        elif not attempt.is_live and status in _ATTEMPT_ENDS:
            attempt.late = status
            self.do(call)
        elif not attempt.is_live or status == "preparing":
            self.refused(call)
        else:
            self.end(rollout, attempt, status)
            self.do(call)

    @precondition(lambda self: self.rollouts)
    @rule(number=picks, status=st.sampled_from(sorted(_MOVES)), how=st.sampled_from(["update", "cancel"]))
    def move_rollout(self, number: int, status: RolloutStatus, how: Literal["update", "cancel"]) -> None:
        rollout = self.pick(number)
        if how == "cancel":
            status = "cancelled"
            call = self.store.cancel_rollout(rollout.rollout_id)
        else:
            call = self.store.update_rollout(rollout.rollout_id, status=status)
        if status == rollout.status:
            self.do(call)
            return
        if status not in _MOVES[rollout.status]:
            self.refused(call)
            return
        self.move(rollout, status)
        if status not in ("preparing", "running") and rollout.attempts and rollout.attempts[-1].is_live:
            rollout.attempts[-1].status = "succeeded" if status == "succeeded" else "failed"
        self.do(call)

    @precondition(lambda self: self.rollouts)
    @rule(number=picks)
    def retry(self, number: int) -> None:
        rollout = self.pick(number)
        call = self.store.retry_rollout(rollout.rollout_id)
        if rollout.status in ("failed", "cancelled"):
            self.move(rollout, "requeuing")
            self.do(call)
        else:
            self.refused(call)

    @precondition(lambda self: any(rollout.attempts for rollout in self.rollouts.values()))
    @rule(number=picks, which=picks)
    def release(self, number: int, which: int) -> None:
        rollout, attempt = self.pick_attempt(number, which)
        call = self.store.release_attempt(rollout.rollout_id, attempt.attempt_id)
        if attempt.status == "running":
            self.refused(call)
            return
        if attempt.is_live:
            self.lose(rollout, attempt)
        self.do(call)

    @precondition(lambda self: self.rollouts)
    @rule(number=picks)
    def delete(self, number: int) -> None:
        rollout = self.pick(number)
        call = self.store.delete_rollouts([rollout.rollout_id])
        if rollout.status in ("succeeded", "failed", "cancelled"):
            assert self.do(call) == 1
            del self.rollouts[rollout.rollout_id]
            self.refused(self.store.update_rollout(rollout.rollout_id, mode="val"), NotFoundError)
        else:
            self.refused(call)

    @precondition(lambda self: self.rollouts)
    @rule(number=picks)
    def wait(self, number: int) -> None:
        rollout = self.pick(number)
        ended = self.do(self.store.wait_for_rollouts([rollout.rollout_id], 0))
        assert [item.status for item in ended] == [
            status for status in [rollout.status] if status in ("succeeded", "failed", "cancelled")
        ]

    @rule(name=st.sampled_from("ab"), back=st.booleans(), number=picks)
    def publish(self, name: str, back: bool, number: int) -> None:
        resources_id = f"{self.run_id}-{name}"
        texts = self.versions.setdefault(resources_id, [])
        if back and texts:
            texts.append(texts[number % len(texts)])
            update = self.do(self.store.rollback(resources_id, number % (len(texts) - 1) + 1))
        else:
            texts.append(f"text {next(_numbers)}")
            update = self.do(self.store.update_resources(resources_id, {"prompt": texts[-1]}))
        assert update.version == len(texts)
        self.latest = resources_id

    @precondition(lambda self: self.subject.reopen is not None)
    @rule()
    def close_and_reopen(self) -> None:
        assert self.subject.reopen is not None
        self.subject.store = self.do(_await(self.subject.reopen()))
        self.store = self.subject.store.with_run(self.run_id)

    # --- checks ---

    @invariant()
    def rollouts_equal_the_model(self) -> None:
        stored = self.do(self.store.query_rollouts())
        assert {item.rollout_id: (item.status, item.input, item.resources_id) for item in stored} == {
            item.rollout_id: (item.status, item.input, item.resources_id) for item in self.rollouts.values()
        }
        for item in stored:
            assert (item.end_time is not None) == (item.status in ("succeeded", "failed", "cancelled"))
            attempts = self.rollouts[item.rollout_id].attempts
            latest = item.attempt if isinstance(item, AttemptedRollout) else None
            assert (latest and latest.attempt_id) == (attempts[-1].attempt_id if attempts else None)

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:  # the error of the failed step is more helpful
            return
        for rollout in self.rollouts.values():
            attempts = self.do(self.store.query_attempts(rollout.rollout_id))
            assert [(item.attempt_id, item.status, item.late_status) for item in attempts] == [
                (item.attempt_id, item.status, item.late) for item in rollout.attempts
            ]
            for attempt in rollout.attempts:
                spans = self.do(self.store.query_spans(rollout.rollout_id, attempt.attempt_id))
                assert [span.span_id for span in spans] == attempt.spans
        for resources_id, texts in self.versions.items():
            updates = self.do(self.store.query_resources(resources_id=resources_id))
            assert [update.resources["prompt"].format() for update in updates] == texts  # type: ignore[attr-defined] # a prompt
        newest = self.do(self.store.get_latest_resources())
        assert (newest and newest.resources_id) == self.latest
        claimed = self.do(self.store.dequeue_many_rollouts(limit=100))
        assert [item.rollout_id for item in claimed] == self.queue


async def compare_with_model(store: LightningStore, reopen: Reopen | None = None) -> None:
    """Searches for a sequence of calls after which store and model differ.

    Args:
        store: the tested store; called in the running event loop.
        reopen: closes a durable store and opens it again.

    Raises:
        AssertionError: there is such a sequence; Hypothesis prints the shortest.
    """
    subject = _Subject(store, asyncio.get_running_loop(), reopen)
    machine = type("StoreMachine", (StoreMachine,), {"subject": subject})
    # Reopening a store takes as long as a hundred calls.
    search = SEARCH if reopen is None else settings(SEARCH, max_examples=SEARCH.max_examples // 2)
    await asyncio.to_thread(run_state_machine_as_test, machine, settings=search)


async def _await(work: Awaitable[T]) -> T:
    return await work
