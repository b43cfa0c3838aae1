"""The answers of backends while they arrive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, TypeAlias

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

MAX_ANSWER_BYTES: Final = 256 * 2**20
"""Largest size of a whole answer or of a stream."""
MAX_EVENT_BYTES: Final = 8 * 2**20
"""Largest size of one event of a stream, or of an error."""


@contextlib.asynccontextmanager
async def idle_timeout(limit_s: float) -> AsyncIterator[Callable[[], None]]:
    """Raises TimeoutError from its block if the function that it yields is not called for ``limit_s`` seconds.

    The timer is moved only after a hundredth of the limit: a new timer for each piece of a stream, as in aiohttp's
    ``sock_read``, costs noticeable CPU time.
    """
    loop = asyncio.get_running_loop()
    moved_at = loop.time()

    def reset() -> None:
        nonlocal moved_at
        now = loop.time()
        if now > moved_at + limit_s / 100 and not timeout.expired():
            timeout.reschedule(now + limit_s)
            moved_at = now

    try:
        async with asyncio.timeout(limit_s) as timeout:
            yield reset
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise TimeoutError(f"it was silent for {limit_s:g} s") from error


@dataclass(eq=False)
class IteratedAnswer:
    """An answer from an iterator, which serves as the HTTP response and as its content."""

    pieces: AsyncIterator[bytes]
    content_type: str = "application/json"
    status: int = 200
    source: object = None
    """The stream behind ``pieces``, if it has to be closed too: closing a generator does not close its source."""
    is_over: bool = False
    more_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        headers = CIMultiDict(self.more_headers)
        headers["Content-Type"] = self.content_type
        return CIMultiDictProxy(headers)

    @property
    def content(self) -> Self:
        return self

    async def readany(self) -> bytes:
        try:
            return await anext(self.pieces)
        except StopAsyncIteration:
            self.is_over = True
            return b""

    def at_eof(self) -> bool:
        return self.is_over

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self.pieces, self.source):
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()


BackendAnswer: TypeAlias = aiohttp.ClientResponse | IteratedAnswer
"""The answer of a backend, whose status and headers have arrived."""


async def once(body: bytes) -> AsyncIterator[bytes]:
    """Yields a whole body as one piece, for ``IteratedAnswer``."""
    yield body
