"""Fixtures of the tracer tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from agentlightning.errors import StoreError
from agentlightning.records import AttemptedRollout, Span
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.tracer.tracer import Tracer


@contextlib.asynccontextmanager
async def working(tracer: Tracer, store: LightningStore) -> AsyncIterator[None]:
    """Sets a tracer up as a runner does."""
    tracer.init()
    tracer.init_worker("worker", store)
    try:
        yield
    finally:
        await asyncio.to_thread(tracer.teardown_worker, "worker")
        tracer.teardown()


@contextlib.asynccontextmanager
async def memory_store(
    *, stall: Callable[[], Awaitable[object]] | None = None, is_failing: bool = False
) -> AsyncIterator[LightningStore]:
    """Opens an empty store; optionally its first write of spans waits for ``stall``, or all of them fail."""
    store = create_store("memory://")
    add_many_spans = store.add_many_spans
    stalls = [stall] if stall else []

    async def add_slowly(spans: Sequence[Span]) -> Sequence[Span]:
        if stalls:
            await stalls.pop()()
        if is_failing:
            raise StoreError("the store is down")
        return await add_many_spans(spans)

    if stall or is_failing:
        setattr(store, "add_many_spans", add_slowly)  # noqa: B010 # a method of an instance, which types forbid
    try:
        yield store
    finally:
        await store.close()


def ids_of(rollout: AttemptedRollout) -> dict[str, Any]:
    """Returns the ids as arguments of ``trace_context``."""
    return {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}


async def stored(store: LightningStore, rollout: AttemptedRollout) -> list[Span]:
    """Returns the spans of an attempt in the order of their arrival."""
    return list(await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id))


async def by_name(store: LightningStore, rollout: AttemptedRollout) -> dict[str, Span]:
    """Returns the spans of an attempt by name."""
    return {span.name: span for span in await stored(store, rollout)}
