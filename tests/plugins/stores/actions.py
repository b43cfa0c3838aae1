"""Actions that many tests of a store share, beside those of the conformance kit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from agentlightning.event import Event
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.actions import soon
from agentlightning.types import Attempt, AttemptedRollout, Rollout


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


async def subscribe(store: LightningStore, kinds: Sequence[str] | None) -> AsyncIterator[Event]:
    """Returns an active subscription: one that has received a first event, for the metrics of step 0."""
    events = store.subscribe(kinds)
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
