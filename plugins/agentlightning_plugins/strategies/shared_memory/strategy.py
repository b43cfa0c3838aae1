"""Strategy ``shm``: the algorithm and the runners are threads of this process and share one store object."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from agentlightning.errors import ConfigError
from agentlightning.execution import AlgorithmJob, ExecutionStrategy, RunnerJob
from agentlightning.plugin.settings import require_least
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.garbage_collection import relaxed_collector
from agentlightning_plugins.strategies.processes.stopping import until_sigterm

_DRAIN_S = 30.0


class _LoopThread(threading.Thread):
    """A daemon thread that runs one coroutine in its own event loop and keeps its exception."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], name: str, on_end: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._coroutine = coroutine
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.create_task(self._coroutine)
            await self._task

        try:
            asyncio.run(main())
        except asyncio.CancelledError:
            return
        except BaseException as error:  # isolation point: the thread that started us raises it
            self.error = error
        finally:
            self._on_end()

    def cancel(self) -> None:
        if self._loop is not None and self._task is not None and self.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Runs everything in threads of this process: quick to start and easy to debug."""

    def __init__(self, n_runners: int = 1, main_thread: Literal["runner", "algorithm"] = "algorithm") -> None:
        """Sets up the threads.

        Args:
            n_runners: number of runner threads, each with its own event loop.
            main_thread: the half that runs in the calling thread, where debuggers and signal handlers work.

        Raises:
            ConfigError: several runners cannot share the main thread.
        """
        require_least(1, n_runners=n_runners)
        if main_thread == "runner" and n_runners != 1:
            raise ConfigError(f"main_thread='runner' allows 1 runner, not {n_runners}")
        self.n_runners = n_runners
        self.main_thread = main_thread

    def execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore) -> None:
        """See ``ExecutionStrategy``. SIGTERM shuts down like Ctrl-C, then raises SystemExit(143)."""
        with relaxed_collector():
            self._execute(algorithm, runner, store)

    def _execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore) -> None:
        stop = threading.Event()
        if self.main_thread == "algorithm":
            runners = [
                _LoopThread(_as_coroutine(runner, store, f"runner-{index}", stop), f"runner-{index}")
                for index in range(self.n_runners)
            ]
            for thread in runners:
                thread.start()
            try:
                asyncio.run(until_sigterm(_unless_runners_fail(algorithm, store, runners)))
            finally:
                stop.set()
                for thread in runners:
                    thread.join(_DRAIN_S)
            return
        worker = _LoopThread(algorithm(store), "algorithm", on_end=stop.set)
        worker.start()
        try:
            asyncio.run(_as_coroutine(runner, store, "runner-0", stop))
        finally:
            if not stop.is_set():
                worker.cancel()
            worker.join(_DRAIN_S)
        if worker.error is not None:
            raise worker.error


async def _as_coroutine(runner: RunnerJob, store: LightningStore, worker_id: str, stop: threading.Event) -> None:
    await runner(store, worker_id, stop)


async def _unless_runners_fail(algorithm: AlgorithmJob, store: LightningStore, runners: list[_LoopThread]) -> None:
    """Runs the algorithm; cancels it when every runner has failed."""
    work = asyncio.ensure_future(algorithm(store))
    while not work.done():
        failed = [thread.error for thread in runners if thread.error is not None]
        if len(failed) == len(runners):
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise failed[0]
        await asyncio.wait([work], timeout=0.2)
    work.result()
