"""Queries that are read page by page, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

from agentlightning.types import PaginatedResult

T = TypeVar("T")
_PAGE: Final = 500


async def every(query: Callable[..., Awaitable[PaginatedResult[T]]], *args: Any, **conditions: Any) -> AsyncIterator[T]:
    """Yields the items of a query of a store, such as ``every(store.query_spans, None, name="chat")``."""
    offset, cursor = 0, None
    while True:
        place = {"offset": offset} if cursor is None else {"cursor": cursor}
        page = await query(*args, limit=_PAGE, **place, **conditions)
        for item in page.items:
            yield item
        if len(page.items) < _PAGE:
            return
        offset, cursor = offset + _PAGE, page.cursor
