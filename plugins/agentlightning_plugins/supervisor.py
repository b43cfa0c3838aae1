"""Keeps runner processes alive, and tells the store of those that die."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import signal
import socket
import time
from typing import Final

from agentlightning.errors import ConfigError, StoreError
from agentlightning.execution import RunnerJob
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.child_process import ChildProcesses
from agentlightning_plugins.job_process import RECYCLE_EXIT_CODE, UNLOADABLE_EXIT_CODE

logger = logging.getLogger("agentlightning")

_QUICK_DEATH_S: Final = 10.0
_QUICK_DEATHS: Final = 3


class Supervisor:
    """Runs ``n_runners`` processes of one job against one store, and replaces those that die, with back-off."""

    def __init__(self, job: RunnerJob, store: LightningStore, url: str, token: str | None, n_runners: int) -> None:
        self._store = store
        self._n_runners = n_runners
        self._processes = ChildProcesses("runner", job, url, token, store.run_id)

    async def run(self) -> None:
        """Runs until every runner has reached its own limit. Cancelling it lets rollouts in flight finish.

        Raises:
            ConfigError: the agent cannot be loaded in a process of its own.
            RuntimeError: a runner dies again and again as soon as it is started.
        """
        await self._bury_predecessors()
        runners = [
            asyncio.create_task(self._keep_alive(f"{_family()}-{os.getpid()}-{index}"))
            for index in range(self._n_runners)
        ]
        try:
            await asyncio.gather(*runners)
        finally:
            for runner in runners:
                runner.cancel()
            await asyncio.gather(*runners, return_exceptions=True)
            self._processes.close()

    async def _keep_alive(self, name: str) -> None:
        quick_deaths = 0
        for life in itertools.count():
            # A new id for each life: the heartbeats of the next one must not keep the leases of the dead one alive.
            worker_id = f"{name}-{life}"
            started = time.monotonic()
            code, last_line = await self._processes.run(worker_id)
            if code == 0:
                return
            await self._bury(worker_id)
            if code == UNLOADABLE_EXIT_CODE:
                raise ConfigError(f"the agent cannot be loaded in a runner process: {last_line}")
            if code == RECYCLE_EXIT_CODE:
                logger.warning("%s was replaced: too many of its agents' threads would not stop", worker_id)
                continue
            quick_deaths = quick_deaths + 1 if time.monotonic() - started < _QUICK_DEATH_S else 1
            what = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            if quick_deaths > _QUICK_DEATHS:
                raise RuntimeError(
                    f"{worker_id} died {quick_deaths} times in a row within seconds ({what}); see its output above"
                )
            logger.warning("%s died (%s) and is started again", worker_id, what)
            await asyncio.sleep(min(0.1 * 4**quick_deaths, 10.0))

    async def _bury(self, worker_id: str) -> None:
        """Frees what a dead runner held, rather than let it wait for the end of its lease."""
        with contextlib.suppress(StoreError, OSError):  # the lease ends it anyhow
            await self._store.end_worker(worker_id)

    async def _bury_predecessors(self) -> None:
        """Does so for runners of a supervisor on this machine that was killed and so could not."""
        with contextlib.suppress(StoreError, OSError):
            for worker in (await self._store.query_workers()).items:
                match = re.fullmatch(re.escape(_family()) + r"-(\d+)-\d+-\d+", worker.worker_id)
                if match is not None and worker.current_attempt_id is not None and not _is_alive(int(match[1])):
                    await self._bury(worker.worker_id)


def _family() -> str:
    return f"runner-{socket.gethostname()}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
