"""Deletes ended rollouts and old workers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from agentlightning.errors import ConfigError
from agentlightning.records import ENDED_ROLLOUT, LIVE_ATTEMPT, Attempt, Rollout, RolloutStatus, Worker
from agentlightning.store.backend import Backend, Condition, Delete, Guard, Query, Row, key_of
from agentlightning.store.check import check_choice, check_int

_SLICE_S: Final = 0.05
"""Other writers wait for a commit that deletes rollouts with their spans, which should not take longer."""
_FIRST_SLICE: Final = 10
_LARGEST_SLICE: Final = 500
ENDED: Final = Condition("status", "in", tuple(sorted(ENDED_ROLLOUT)))
RetentionPolicy: TypeAlias = Callable[[Backend, float], AsyncGenerator[int]]
"""Deletes rollouts that need not be kept at the given Unix time, in slices, and yields how many each slice deleted."""
WORKER_AGE_S: Final = 86_400.0  # workers without a sign of life for this long are deleted


async def delete_old_workers(backend: Backend, now: float) -> int:
    """Deletes the workers that have no live attempt and gave no sign of life for a day; returns how many."""
    old = []
    for row in (await backend.select(Query(Worker))).rows:
        seen = (row.record.last_heartbeat_time, row.record.last_dequeue_time, row.record.ended_at)
        if max(time or 0.0 for time in seen) < now - WORKER_AGE_S:
            old.append(row)
    theirs = Condition("worker_id", "in", tuple(row.record.worker_id for row in old))
    live = Condition("status", "in", tuple(sorted(LIVE_ATTEMPT)))
    busy = {row.record.worker_id for row in (await backend.select(Query(Attempt, (theirs, live)))).rows}
    deleted = 0
    for row in old:
        key = key_of(row.record)
        if row.record.worker_id not in busy:
            deleted += await backend.commit([Delete(Worker, key)], [Guard(Worker, key, row.revision)])
    return deleted


async def delete_ended(
    backend: Backend,
    run_id: str,
    *,
    status_in: Sequence[RolloutStatus] | None = None,
    ended_before: float | None = None,
    keep: int | None = None,
    limit: int | None = None,
) -> int:
    """Implements ``LightningStore.delete_rollouts`` with conditions."""
    for status in status_in or ():
        check_choice("status_in", status, sorted(ENDED_ROLLOUT))
    if limit is not None:
        check_int("limit", limit, 0)
    ended = ENDED if status_in is None else Condition("status", "in", tuple(status_in))
    where = (Condition("run_id", "eq", run_id), ended)
    at_most = math.inf if limit is None else limit
    if keep is not None:
        page = await backend.select(Query(Rollout, where, limit=0, count=True))
        at_most = min(at_most, (page.total or 0) - keep)
    slices = delete_in_order(backend, where, math.inf if ended_before is None else ended_before, at_most)
    return sum([deleted async for deleted in slices])


async def delete_in_order(
    backend: Backend, where: tuple[Condition, ...], ended_before: float, at_most: float
) -> AsyncGenerator[int]:
    """Deletes rollouts in the order of enqueueing, in slices of about ``_SLICE_S``; yields how many each one deleted.

    Pauses as long as each slice took, for other writers. It stops at the first page that is too young, so a policy that
    finds nothing to delete has a constant cost.
    """
    after: int | None = None
    size = _FIRST_SLICE
    while at_most > 0:
        began = time.monotonic()
        page = await backend.select(Query(Rollout, where, limit=int(min(size, at_most)), after=after))
        old = [row for row in page.rows if (row.record.end_time or math.inf) < ended_before]
        deleted = await _delete_rows(backend, old)
        at_most -= deleted
        yield deleted
        # A rollout ends after it is enqueued. If clocks of machines differ a little, the next run deletes the rest.
        if not page.rows or page.rows[-1].record.start_time >= ended_before:
            return
        after = page.position
        took = time.monotonic() - began
        size = min(_LARGEST_SLICE, next_slice(size, took))
        await asyncio.sleep(took)


def next_slice(size: int, took_s: float) -> int:
    """Returns the size of the next slice of a long work, so that other writers wait for about ``_SLICE_S``."""
    return max(1, int(size * min(2.0, _SLICE_S / max(took_s, 1e-6))))


async def _delete_rows(backend: Backend, rows: Sequence[Row[Rollout]]) -> int:
    """Deletes the rollouts that did not change since they were read: one may have been retried."""
    if not rows:
        return 0
    keys = [key_of(row.record) for row in rows]
    guards = [Guard(Rollout, key, row.revision) for key, row in zip(keys, rows, strict=True)]
    if await backend.commit([Delete(Rollout, key) for key in keys], guards):
        return len(rows)
    return sum([await _delete_rows(backend, [row]) for row in rows]) if len(rows) > 1 else 0


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for keeping ended rollouts with their attempts and spans.

    The process that owns the store deletes all other ended rollouts, in the order of enqueueing. Queued and running
    rollouts are never deleted.
    """

    max_age_s: float | None = None
    """Rollouts that ended more than this many seconds ago are deleted."""
    max_rollouts: int | None = None
    """The oldest ended rollouts are deleted while the database holds more than this, of all runs and statuses."""

    def __post_init__(self) -> None:
        for name in ("max_age_s", "max_rollouts"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name}={value}; it can be 0 or more, or None for no limit")

    async def __call__(self, backend: Backend, now: float) -> AsyncGenerator[int]:
        """Deletes the rollouts that the policy does not keep; yields how many each slice of the work deleted."""
        if self.max_age_s is not None:
            async for deleted in delete_in_order(backend, (ENDED,), now - self.max_age_s, math.inf):
                yield deleted
        if self.max_rollouts is not None:
            excess = (await backend.count())["rollouts"] - self.max_rollouts
            async for deleted in delete_in_order(backend, (ENDED,), math.inf, excess):
                yield deleted
