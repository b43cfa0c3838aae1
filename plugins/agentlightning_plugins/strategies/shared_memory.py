"""Strategy ``shm``: the algorithm and the runners are threads of this process and share one store object."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from agentlightning.errors import ConfigError
from agentlightning.execution import RUNNERS_FAILED, AlgorithmJob, ExecutionStrategy, RunnerJob
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.plugin.settings import require_least
from agentlightning.run.thread import STOP_CHECK_S
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.garbage_collection import relaxed_collector
from agentlightning_plugins.shared.processes.stopping import run_with_agents, until_sigterm

logger = logging.getLogger("agentlightning")
_DRAIN_S = 30.0


class _LoopThread(threading.Thread):
    """A daemon thread that runs one coroutine in an event loop and keeps its exception."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, None],
        name: str,
        *,
        run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._coroutine = coroutine
        self._run_coroutine = run
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
            self._run_coroutine(main())
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

    shares_process = True

    def __init__(self, n_runners: int = 1, main_thread: Literal["runner", "algorithm"] = "algorithm") -> None:
        """Sets up the threads.

        Args:
            n_runners: number of runners. They share one event loop, which the next run reuses.
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
            runners = _LoopThread(_run_all(runner, store, self.n_runners, stop), "runners", run=run_with_agents)
            runners.start()
            try:
                asyncio.run(until_sigterm(_unless_runners_fail(algorithm, store, runners)))
            finally:
                stop.set()
                runners.join(_DRAIN_S)
            return
        worker = _LoopThread(algorithm(store), "algorithm", on_end=stop.set)
        worker.start()
        try:
            run_with_agents(until_sigterm(_run_with_algorithm(runner, store, stop)))
        finally:
            if not stop.is_set():
                worker.cancel()
            worker.join(_DRAIN_S)
        if worker.error is not None:
            raise worker.error


async def _run_all(runner: RunnerJob, store: LightningStore, n_runners: int, stop: threading.Event) -> None:
    """Runs all runners; raises only if every one of them fails."""
    jobs = [runner(store, f"runner-{index}", stop) for index in range(n_runners)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    if len(failed) == n_runners:
        raise failed[0]
    for error in failed:
        logger.error("a runner failed; the other runners continued: %s", error, exc_info=error)


async def _run_with_algorithm(runner: RunnerJob, store: LightningStore, stop: threading.Event) -> None:
    """Runs a runner here; if it reaches its limit of rollouts, waits for the algorithm."""
    await runner(store, "runner-0", stop)
    while not stop.is_set():  # noqa: ASYNC110 # the event belongs to another thread
        await asyncio.sleep(STOP_CHECK_S)


async def _unless_runners_fail(algorithm: AlgorithmJob, store: LightningStore, runners: _LoopThread) -> None:
    """Runs the algorithm; cancels it when every runner has failed."""
    work = asyncio.ensure_future(algorithm(store))
    while not work.done():
        if runners.error is not None:
            work.cancel(RUNNERS_FAILED)
            await asyncio.gather(work, return_exceptions=True)
            raise runners.error
        await asyncio.wait([work], timeout=0.2)
    work.result()


@hookimpl
def components() -> list[Component]:
    return [Component("strategy", "shm", f"{__name__}:SharedMemoryExecutionStrategy", summary="runners are threads")]
