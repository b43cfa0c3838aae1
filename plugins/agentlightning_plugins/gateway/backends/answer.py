"""The answers of backends while they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from multidict import CIMultiDict, CIMultiDictProxy


class IdleTimeout:
    """Raises TimeoutError from its block if ``reset`` is not called for ``limit_s`` seconds.

    It uses one timer for the whole block, because a timer for each piece of a stream, as in aiohttp's ``sock_read``,
    costs noticeable CPU time. It also works for providers that do not use aiohttp.
    """

    __slots__ = ("_cancelling", "_is_expired", "_limit_s", "_loop", "_reset_at", "_task", "_timer")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def reset(self) -> None:
        """Restarts the timeout."""
        self._reset_at = self._loop.time()

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._is_expired = False
        self._reset_at = self._loop.time()
        self._timer = self._loop.call_at(self._reset_at + self._limit_s, self._check)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._is_expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError(f"it was silent for {self._limit_s:g} s") from error

    def _check(self) -> None:
        due = self._reset_at + self._limit_s
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._check)
        else:
            self._is_expired = True
            self._task.cancel()


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
