"""A timeout that activity resets."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


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
