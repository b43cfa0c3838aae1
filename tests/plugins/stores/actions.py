"""Actions that many tests of a store share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from agentlightning.event import Event
from agentlightning.store.engine import BackendStore
from agentlightning.store.protocol import LightningStore
from agentlightning.store.retention import RetentionPolicy
from agentlightning.testing.store.primitives import soon
from agentlightning.types import Attempt, AttemptedRollout, AttemptStatus, Rollout, RolloutConfig, Span

_numbers = itertools.count(1)


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


async def number_deleted(policy: RetentionPolicy, store: BackendStore, now: float) -> int:
    """Applies a retention policy once."""
    return sum([deleted async for deleted in policy(store.backend, now)])


def make_span(of: AttemptedRollout, name: str = "step", **attributes: Any) -> Span:
    """Makes a new span of an attempt, without a number."""
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=of.rollout_id,
        attempt_id=of.attempt.attempt_id,
        name=name,
        span_id=f"{next(_numbers):016x}",
    )


async def read(store: LightningStore, rollout_id: str) -> Rollout:
    """Returns a rollout as it is stored now."""
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None, f"rollout {rollout_id} is not stored"
    return rollout


async def read_attempted(store: LightningStore, rollout_id: str) -> AttemptedRollout:
    """Returns a rollout with its latest attempt."""
    rollout = await read(store, rollout_id)
    assert isinstance(rollout, AttemptedRollout)
    return rollout


async def latest_attempt(store: LightningStore, rollout: Rollout) -> Attempt:
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    return attempt


async def subscribe(store: LightningStore, kinds: Sequence[str] | None, **options: Any) -> AsyncIterator[Event]:
    """Returns an active subscription: one that has received a first event, for the metrics of step 0."""
    events = store.subscribe(kinds, **options)
    first = asyncio.create_task(_first(events))
    while not first.done():
        await store.add_metrics(0, {})
        await asyncio.wait([first], timeout=0.02)
    assert first.result().kind == "step_finished"
    return events


async def next_event(events: AsyncIterator[Event]) -> Event:
    """Returns the next event."""
    return await soon(_first(events))


async def _first(events: AsyncIterator[Event]) -> Event:
    return await anext(events)


async def close(events: AsyncIterator[Event]) -> None:
    """Ends a subscription."""
    if isinstance(events, AsyncGenerator):
        await events.aclose()
