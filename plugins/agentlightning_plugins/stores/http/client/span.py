from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from pydantic import TypeAdapter

from agentlightning.types import FilterLogic, PaginatedResult, ReadableSpan, SortOrder, Span
from agentlightning_plugins.stores.http import message
from agentlightning_plugins.stores.http.client.call import StoreCalls, read_page

_spans: Final[TypeAdapter[list[Span]]] = TypeAdapter(list[Span])


class SpanCalls(StoreCalls):
    """The part of the client that is about spans."""

    async def add_span(self, span: Span) -> Span | None:
        stored = await self.add_many_spans([span])
        return stored[0] if stored else None

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        if not spans:
            return []
        spans = [span.sealed() for span in spans]
        body: message.AddSpans = {"spans": spans}
        answer = await self._post("/spans/batch", body, repeatable=True)
        return [
            span if number == span.sequence_id else span.model_copy(update={"sequence_id": number})
            for span, number in zip(spans, answer["sequence_ids"], strict=True)
            if number is not None
        ]

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        return await self.add_span(Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        body: message.NextSpanId = {"rollout_id": rollout_id, "attempt_id": attempt_id}
        return int(await self._post("/spans/next", body, repeatable=True))

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        body: message.NextSpanIds = {"rollout_attempt_ids": list(rollout_attempt_ids)}
        numbers: list[int] = await self._post("/spans/next/batch", body, repeatable=True)
        return numbers

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
        body = {
            "rollout_id": rollout_id,
            "attempt_id": attempt_id,
            "trace_id": trace_id,
            "trace_id_contains": trace_id_contains,
            "span_id": span_id,
            "span_id_contains": span_id_contains,
            "parent_id": parent_id,
            "parent_id_contains": parent_id_contains,
            "name": name,
            "name_contains": name_contains,
            "filter_logic": filter_logic,
            "limit": limit,
            "offset": offset,
            "sort_by": sort_by,
            "sort_order": sort_order,
            "run_id": run_id,
            "start_after": start_after,
            "start_before": start_before,
            "cursor": cursor,
        }
        page = await self._post("/spans/search", body, repeatable=True)
        return read_page(page, _spans.validate_python(page["items"]))
