"""Short forms of what nearly every test of a store begins with."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from agentlightning.store.protocol import LightningStore
from agentlightning.types import Attempt, AttemptedRollout, AttemptStatus, Rollout, RolloutConfig, Span

T = TypeVar("T")

PATIENCE_S = 20.0
"""How long a test waits for what must happen. Only a broken store makes one wait that long."""

_numbers = itertools.count(1)


async def soon(awaitable: Awaitable[T]) -> T:
    """The result, or a TimeoutError after ``PATIENCE_S``."""
    return await asyncio.wait_for(awaitable, PATIENCE_S)


async def in_other_thread(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Awaits a coroutine in an event loop of another thread."""
    return await soon(asyncio.to_thread(lambda: asyncio.run(call())))


async def claim(store: LightningStore, *, config: RolloutConfig | None = None) -> AttemptedRollout:
    """A rollout of which the first attempt has just begun."""
    queued = await store.enqueue_rollout({"question": "2 + 2"}, config=config)
    claimed = await store.dequeue_rollout()
    assert claimed is not None, "an enqueued rollout was not handed out"
    assert claimed.rollout_id == queued.rollout_id
    return claimed


async def finish(store: LightningStore, claimed: AttemptedRollout, status: AttemptStatus = "succeeded") -> Attempt:
    """Reports the end of an attempt."""
    return await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status=status)


async def read(store: LightningStore, rollout_id: str) -> Rollout:
    """A rollout as it is stored now."""
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None, f"rollout {rollout_id} is gone"
    return rollout


def make_span(of: AttemptedRollout, name: str = "step", **attributes: Any) -> Span:
    """A new span of an attempt, with no number yet."""
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=of.rollout_id,
        attempt_id=of.attempt.attempt_id,
        name=name,
        span_id=f"{next(_numbers):016x}",
    )
