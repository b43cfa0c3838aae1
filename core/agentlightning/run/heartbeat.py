"""Sends a runner's heartbeats from a separate thread, and reports agents that block the runner's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Final

logger = logging.getLogger("agentlightning")

_REPORT_AFTER_S: Final = 5.0
_CHECK_S: Final = 1.0


class Heartbeats:
    """Calls ``beat`` at an interval, in the event loop of a separate thread.

    So the other rollouts of a runner do not lose their leases while an agent blocks the runner's event loop.
    """

    def __init__(self, beat: Callable[[], Awaitable[None]], interval_s: float, worker_id: str) -> None:
        """Starts the thread; must be called in the runner's event loop."""
        self._beat = beat
        self._interval_s = interval_s
        self._worker_id = worker_id
        self.loop: Final = asyncio.get_running_loop()
        """The runner's loop."""
        self._loop_thread = threading.get_ident()
        self._is_stopped = False
        self._task: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._thread = threading.Thread(target=self._work, name=f"heartbeats-{worker_id}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._is_stopped

    def stop(self) -> None:
        """Ends the thread soon; a heartbeat that is being sent is cancelled."""
        self._is_stopped = True
        if self._task is not None:
            loop, task = self._task
            with contextlib.suppress(RuntimeError):  # the thread's loop is closed
                loop.call_soon_threadsafe(task.cancel)

    def _work(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), asyncio.Runner() as runner:
            runner.run(self._beat_until_stopped())

    async def _beat_until_stopped(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = asyncio.get_running_loop(), task
        checks = asyncio.create_task(self._check_loop())
        try:
            while not self._is_stopped:
                try:
                    await self._beat()
                except Exception:  # isolation point: without heartbeats, the runner would lose all of its rollouts
                    if not self._is_stopped:
                        logger.exception("worker %s could not send its heartbeat", self._worker_id)
                await asyncio.sleep(self._interval_s)
        finally:
            checks.cancel()

    async def _check_loop(self) -> None:
        """Warns at doubling intervals that the runner's loop is blocked."""
        while not self._is_stopped:
            answered = threading.Event()
            try:
                self.loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the runner's loop is closed
                return
            n_checks, report_after_s = 0, _REPORT_AFTER_S
            await asyncio.sleep(_CHECK_S)
            while not answered.is_set():
                n_checks += 1
                blocked_s = n_checks * _CHECK_S  # not by the clock: the process may have been suspended
                if blocked_s >= report_after_s:
                    report_after_s = 2 * blocked_s
                    self._report(blocked_s)
                await asyncio.sleep(_CHECK_S)

    def _report(self, blocked_s: float) -> None:
        task = asyncio.current_task(self.loop)
        logger.warning(
            "%s has blocked the event loop of worker %s for %.0f s, at %s; all rollouts of this runner wait. "
            "Await something, use asyncio.to_thread, or make the agent a plain function",
            "a callback" if task is None else f"the agent of {task.get_name()}",
            self._worker_id,
            blocked_s,
            self._find_line(),
        )

    def _find_line(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return "an unknown line"
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}: {line}"
