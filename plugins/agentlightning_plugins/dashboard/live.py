"""Notifies open pages when their run changes: one subscription per run serves any number of pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web

from agentlightning.errors import StoreError
from agentlightning.store.protocol import LightningStore

logger = logging.getLogger("agentlightning")
_PAUSE_S: Final = 1.0
"""Minimum time between two events that a page receives."""
_PAUSE_OF_PAGE_S: Final = 0.25
"""Added to ``_PAUSE_S`` for each open page, so that many pages do not slow down the run."""
_KEEPALIVE_S: Final = 10.0
_HEADERS: Final = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


class LiveRuns:
    """The runs that are shown in open pages."""

    def __init__(self) -> None:
        self._runs: dict[str, _LiveRun] = {}
        self._stopping = asyncio.Event()

    @property
    def readers(self) -> int:
        """The number of open pages."""
        return sum(run.readers for run in self._runs.values())

    async def answer(
        self, request: web.Request, store: LightningStore, is_admitted: Callable[[web.Request], bool]
    ) -> web.StreamResponse:
        """Sends an event ``changed`` when the run has new events, at a limited rate, while the request is admitted."""
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        run_id = request.match_info["run_id"]
        run = self._runs.get(run_id)
        if run is None or run.task.done():
            run = self._runs[run_id] = _LiveRun(store)
        run.readers += 1
        seen = run.number
        try:
            await response.write(b": live\n\n")
            while is_admitted(request) and not self._stopping.is_set():
                if await run.wait(seen, self._stopping):
                    seen = run.number
                    await response.write(b"event: changed\ndata: {}\n\n")
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stopping.wait(), _PAUSE_S + _PAUSE_OF_PAGE_S * self.readers)
                elif run.task.done():
                    break
                else:
                    await response.write(b": keep-alive\n\n")
        except ConnectionError:
            pass  # the page was closed
        finally:
            run.readers -= 1
            if not run.readers:
                run.task.cancel()
                if self._runs.get(run_id) is run:
                    del self._runs[run_id]
        return response

    async def stop(self) -> None:
        """Ends all streams and subscriptions."""
        self._stopping.set()
        runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            run.task.cancel()
        if runs:
            await asyncio.wait([run.task for run in runs])


class _LiveRun:
    """The subscription to one run."""

    def __init__(self, store: LightningStore) -> None:
        self.readers = 0
        self.number = 0
        """Number of events so far."""
        self._changed = asyncio.Event()
        self._store = store
        self.task = asyncio.get_running_loop().create_task(self._read())

    async def wait(self, seen: int, stopping: asyncio.Event) -> bool:
        """Waits for an event after number ``seen``; returns False if none arrived in time."""
        if self.number == seen:
            waiters = [asyncio.ensure_future(event.wait()) for event in (self._changed, stopping)]
            awaited: list[asyncio.Future[Any]] = [*waiters, self.task]
            await asyncio.wait(awaited, timeout=_KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            for waiter in waiters:
                waiter.cancel()
        return self.number != seen

    async def _read(self) -> None:
        try:
            async for _ in self._store.subscribe():
                self.number += 1
                self._changed.set()
                self._changed = asyncio.Event()
        except StoreError as error:
            logger.info("live pages of run %s: %s", self._store.run_id, error)
