"""The answers of backends while they arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from multidict import CIMultiDict, CIMultiDictProxy

MAX_ANSWER_BYTES: Final = 256 * 2**20
"""Largest size of a whole answer or of a stream."""


class BackendContent(Protocol):
    """The body of an answer while it arrives."""

    async def readany(self) -> bytes:
        """Waits for data and returns all that has arrived; empty at the end."""

    def at_eof(self) -> bool:
        """Whether everything has been read."""


class BackendAnswer(Protocol):
    """The answer of a backend, such as an ``aiohttp.ClientResponse``."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> CIMultiDictProxy[str]: ...

    @property
    def content_type(self) -> str:
        """``text/event-stream`` for a stream."""

    @property
    def content(self) -> BackendContent: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(eq=False)
class IteratedAnswer:
    """An answer from an iterator, which serves as the HTTP response and as its content."""

    pieces: AsyncIterator[bytes]
    content_type: str = "application/json"
    status: int = 200
    source: object = None
    """The stream behind ``pieces``, if it has to be closed too: closing a generator does not close its source."""
    is_over: bool = False

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        return CIMultiDictProxy(CIMultiDict({"Content-Type": self.content_type}))

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


async def once(body: bytes) -> AsyncIterator[bytes]:
    """Yields a whole body as one piece, for ``IteratedAnswer``."""
    yield body
