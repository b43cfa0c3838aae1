"""Keeps runners alive, wherever they run, and tells the store of those that die."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import secrets
import socket
import time
from typing import Final, Literal, NamedTuple, Protocol

from agentlightning.errors import ConfigError, StoreError
from agentlightning.execution import RUNNERS_FAILED, AlgorithmJob
from agentlightning.store.protocol import LightningStore

logger = logging.getLogger("agentlightning")

_QUICK_DEATH_S: Final = 10.0
_QUICK_DEATHS: Final = 3
_at_work: Final[set[str]] = set()
"""Keys of this process's supervisors."""


class Ending(NamedTuple):
    """How a runner ended."""

    how: Literal["done", "worn out", "unloadable", "died"]
    """``unloadable``: its job cannot be loaded there, and would not be a second time."""
    words: str = ""
    """Of what it died, or why the job cannot be loaded."""


class Runners(Protocol):
    """Somewhere to run runners of one job."""

    async def run(self, worker_id: str) -> Ending:
        """Runs one to its end. Cancelling it lets rollouts in flight finish; cancelling it once more does not."""
        ...

    def close(self) -> None:
        """Gives back what was needed to run them; none is running any more."""
        ...


class Supervisor:
    """Keeps ``n_runners`` runners at work for one store, and replaces those that die, with back-off."""

    def __init__(self, runners: Runners, store: LightningStore, n_runners: int) -> None:
        self._runners = runners
        self._store = store
        self._n_runners = n_runners
        self._key = secrets.token_hex(3)

    async def run(self) -> None:
        """Runs until every runner has reached its own limit. Cancelling it lets rollouts in flight finish.

        Raises:
            ConfigError: the agent cannot be loaded where runners run.
            RuntimeError: a runner dies again and again as soon as it is started.
        """
        _at_work.add(self._key)
        await self._bury_predecessors()
        runners = [
            asyncio.create_task(self._keep_alive(f"{_family()}-{os.getpid()}-{self._key}-{index}"))
            for index in range(self._n_runners)
        ]
        try:
            await asyncio.gather(*runners)
        finally:
            for runner in runners:
                runner.cancel()
            await asyncio.gather(*runners, return_exceptions=True)
            self._runners.close()
            _at_work.discard(self._key)

    async def _keep_alive(self, name: str) -> None:
        quick_deaths = 0
        for life in itertools.count():
            # A new id for each life: the heartbeats of the next one must not keep the leases of the dead one alive.
            worker_id = f"{name}-{life}"
            started = time.monotonic()
            ending = await self._runners.run(worker_id)
            if ending.how == "done":
                return
            await self._bury(worker_id)
            if ending.how == "unloadable":
                raise ConfigError(f"the agent cannot be loaded in a runner process: {ending.words}")
            if ending.how == "worn out":
                logger.warning("%s was replaced: too many of its agents' threads would not stop", worker_id)
                continue
            quick_deaths = quick_deaths + 1 if time.monotonic() - started < _QUICK_DEATH_S else 1
            if quick_deaths > _QUICK_DEATHS:
                raise RuntimeError(
                    f"{worker_id} died {quick_deaths} times in a row within seconds ({ending.words}); "
                    "see its output above"
                )
            logger.warning("%s died (%s) and is started again", worker_id, ending.words)
            await asyncio.sleep(min(0.1 * 4**quick_deaths, 10.0))

    async def _bury(self, worker_id: str) -> None:
        """Frees what a dead runner held, rather than let it wait for the end of its lease."""
        with contextlib.suppress(StoreError, OSError):  # the lease ends it anyhow
            await self._store.end_worker(worker_id)

    async def _bury_predecessors(self) -> None:
        """Does so for runners of a supervisor on this machine that was killed and so could not."""
        with contextlib.suppress(StoreError, OSError):
            for worker in (await self._store.query_workers()).items:
                match = re.fullmatch(re.escape(_family()) + r"-(\d+)-(\w+)-\d+-\d+", worker.worker_id)
                if (
                    match is not None
                    and worker.current_attempt_id is not None
                    and not _is_at_work(int(match[1]), match[2])
                ):
                    await self._bury(worker.worker_id)


async def run_both(algorithm: AlgorithmJob, store: LightningStore, supervisor: Supervisor) -> None:
    """Runs an algorithm and the runners that work for it, until the algorithm is done or nobody is left to work."""
    runners = asyncio.create_task(supervisor.run())
    work = asyncio.ensure_future(algorithm(store))
    reason: str | None = None
    try:
        done, _ = await asyncio.wait({runners, work}, return_when=asyncio.FIRST_COMPLETED)
        if runners in done and runners.exception() is None:  # each ran as many rollouts as it was to
            await work
        if runners in done and runners.exception() is not None:
            reason = RUNNERS_FAILED
        for task in (runners, work):  # when both failed, the runners did so first
            if task in done:
                task.result()
    finally:
        for task in (work, runners):
            task.cancel(reason)
            await asyncio.gather(task, return_exceptions=True)


def _family() -> str:
    return f"runner-{socket.gethostname()}"


def _is_at_work(pid: int, key: str) -> bool:
    """Whether a supervisor of this machine still runs. A container gives each of its lives the same process id."""
    if pid == os.getpid():
        return key in _at_work
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
