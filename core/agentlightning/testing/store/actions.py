"""Actions that many tests of a store share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from agentlightning.records import Attempt, AttemptedRollout, AttemptStatus, RolloutConfig, Span
from agentlightning.store.protocol import LightningStore

T = TypeVar("T")

PATIENCE_S = 60.0
"""How long a test waits for something that must happen. Only a broken store makes a test wait that long."""

ANSWERS = (
    "a call hangs, or the wake-up that it waits for was lost: watch calls each listener with the events of every "
    "commit and claim, of all threads, after their change can be read"
)
"""The rule that a store breaks if a call does not return."""

_numbers = itertools.count(1)


async def soon(awaitable: Awaitable[T], rule: str = ANSWERS) -> T:
    """Returns the result, or raises AssertionError with the broken rule after ``PATIENCE_S``."""
    try:
        async with asyncio.timeout(PATIENCE_S) as limit:
            return await awaitable
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(f"nothing happened for {PATIENCE_S:g} s: {rule}") from None


async def in_other_thread(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Awaits a coroutine in an event loop of another thread."""
    return await asyncio.to_thread(lambda: asyncio.run(soon(call())))


async def claim(
    store: LightningStore, worker_id: str | None = None, config: RolloutConfig | None = None
) -> AttemptedRollout:
    """Enqueues and claims a rollout."""
    queued = await store.enqueue_rollout({"question": "2 + 2"}, config=config)
    claimed = await dequeue(store, worker_id)
    assert claimed.rollout_id == queued.rollout_id
    return claimed


async def dequeue(store: LightningStore, worker_id: str | None = None, *, timeout: float = 0) -> AttemptedRollout:
    """Claims a rollout that must be in the queue, or arrive within the timeout."""
    claimed = await store.dequeue_rollout(worker_id, timeout=timeout)
    assert claimed is not None, "a queued rollout was not handed out"
    return claimed


async def finish(store: LightningStore, claimed: AttemptedRollout, status: AttemptStatus = "succeeded") -> Attempt:
    """Reports the end of an attempt."""
    return await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status=status)


def make_span(of: AttemptedRollout, name: str = "step", **attributes: Any) -> Span:
    """Makes a new span of an attempt, without a number."""
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=of.rollout_id,
        attempt_id=of.attempt.attempt_id,
        name=name,
        span_id=f"{next(_numbers):016x}",
    )
