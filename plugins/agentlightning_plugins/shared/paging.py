"""Queries that are read page by page, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

from agentlightning.errors import StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning.types import PaginatedResult, Span

T = TypeVar("T")
_PAGE: Final = 500


async def every(query: Callable[..., Awaitable[PaginatedResult[T]]], *args: Any, **conditions: Any) -> AsyncIterator[T]:
    """Yields the items of a query of a store, such as ``every(store.query_spans, None, name="chat")``."""
    offset, cursor = 0, None
    while True:
        place = {"offset": offset} if cursor is None else {"cursor": cursor}
        page = await query(*args, limit=_PAGE, **place, **conditions)
        if page.truncated:
            raise StoreError("the store ended this search at its time limit; search one run, or by fewer conditions")
        for item in page.items:
            yield item
        if len(page.items) < _PAGE:
            return
        offset, cursor = offset + _PAGE, page.cursor


async def read_spans(
    store: LightningStore, rollout_id: str, attempt_id: str, *, max_bytes: int, max_spans: int = 5_000
) -> tuple[list[Span], int]:
    """Reads the first spans of an attempt, page by page, until they have about ``max_bytes``.

    Returns them, and the number of spans that the attempt has.
    """
    spans: list[Span] = []
    size = 0
    while True:
        limit = min(100, max_spans - len(spans))
        page = await store.query_spans(rollout_id, attempt_id, offset=len(spans), limit=limit)
        for span in page:
            size += 500 + sum(_estimate_bytes(value) for value in span.attributes.values())
            if spans and size > max_bytes:
                return spans, page.total
            spans.append(span)
        if not page.items or len(spans) >= min(page.total, max_spans):
            return spans, max(page.total, len(spans))


def _estimate_bytes(value: Any) -> int:
    return len(value) if isinstance(value, str) else 8 if not isinstance(value, (dict, list)) else len(repr(value))
