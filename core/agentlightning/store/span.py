"""The engine's spans."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Literal

from agentlightning.errors import ConfigError
from agentlightning.lifecycle import move_attempt
from agentlightning.store.backend import Row
from agentlightning.store.filter import Filter, find
from agentlightning.store.transaction import Transactional, now
from agentlightning.store.transition import Change
from agentlightning.types import Attempt, FilterLogic, PaginatedResult, ReadableSpan, Rollout, SortOrder, Span


class SpanMethods(Transactional):
    """Storing spans, which are signs of life too, and finding them again."""

    async def add_span(self, span: Span) -> Span | None:
        """Stores a span; None when it is stored already.

        Raises:
            NotFoundError: an unknown rollout or attempt.
        """
        return (await self._append([span]))[0]

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Stores spans in order, all or none, leaving out those that are stored already.

        Raises:
            NotFoundError: one names an unknown rollout or attempt; nothing is stored.
        """
        return [span for span in await self._append(spans) if span is not None]

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        return await self.add_span(Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return (await self._database.backend.next_sequence_ids([(rollout_id, attempt_id)]))[0]

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        return await self._database.backend.next_sequence_ids([(pair[0], pair[1]) for pair in rollout_attempt_ids])

    async def query_spans(
        self,
        rollout_id: str | None,
        attempt_id: str | Literal["latest"] | None = None,
        *,
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
        """Finds spans of one rollout, or (``rollout_id=None``) across the rollouts of a run.

        ``filter_logic`` joins the filters on trace, span, parent and name; rollout, attempt, run and times must hold in
        any case. Sequence numbers of different attempts say nothing about their order: across rollouts, and with a
        cursor, ``sort_by="sequence_id"`` therefore means the order in which the spans were stored.
        """
        if attempt_id == "latest":
            if rollout_id is None:
                raise ConfigError("attempt_id='latest' needs a rollout_id")
            latest = await self._latest_attempt(rollout_id)
            if latest is None:
                return PaginatedResult(items=[], limit=limit, offset=offset, total=0)
            attempt_id = latest.record.attempt_id
        if rollout_id is None and run_id is None:
            run_id = self.run_id
        if (rollout_id is None or cursor is not None) and sort_by == "sequence_id":
            sort_by = None
        query = (
            Filter(filter_logic)
            .scope(rollout_id=rollout_id, attempt_id=attempt_id, run_id=run_id)
            .between("start_time", start_after, start_before)
            .equal(trace_id=trace_id, span_id=span_id, parent_id=parent_id, name=name)
            .contain(
                trace_id=trace_id_contains, span_id=span_id_contains, parent_id=parent_id_contains, name=name_contains
            )
            .query(Span, sort_by=sort_by, sort_order=sort_order, limit=limit, offset=offset, cursor=cursor)
        )
        return await find(self._database.backend, query, cursor)

    async def _append(self, spans: Sequence[Span]) -> Sequence[Span | None]:
        if not spans:
            return []
        spans = [span.sealed() for span in spans]
        attempts = {(span.rollout_id, span.attempt_id) for span in spans}
        backend, new = self._database.backend, attempts - self._database.begun
        appending = backend.append_spans(spans, now())
        if len(attempts) == len(new) == 1 and backend.durable:
            return await self._begin_with(appending, new.pop())
        stored = await appending
        for attempt in new:
            await self._begin(*attempt)
        return stored

    async def _begin_with(
        self, appending: Coroutine[Any, Any, Sequence[Span | None]], attempt: tuple[str, str]
    ) -> Sequence[Span | None]:
        """Has the first spans of an attempt and its beginning share a transaction, where a database can."""
        task = asyncio.ensure_future(appending)
        try:
            await asyncio.sleep(0)  # it is with the database now, or refused: then nothing begins
            if not task.done():
                await self._begin(*attempt)
        except BaseException:
            task.cancel()
            raise
        stored = await task
        if attempt not in self._database.begun:  # it was quicker than one turn of the loop
            await self._begin(*attempt)
        return stored

    async def _begin(self, rollout_id: str, attempt_id: str) -> None:
        """Moves an attempt from preparing to running: it has a span."""

        async def plan(rollout: Row[Rollout], attempt: Row[Attempt]) -> Change[None]:
            change = Change(None)
            if attempt.record.status == "preparing":
                time = now()
                outcome = move_attempt(rollout.record, attempt.record, "running", time)
                change.step(rollout, attempt, outcome, time)
            return change

        await self._step(rollout_id, attempt_id, plan, beats=True)
        self._database.mark_begun((rollout_id, attempt_id))
