"""Supervises runners: serves them the store, restarts those that die and releases their rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from agentlightning.errors import ConfigError, StoreError
from agentlightning.execution import RUNNERS_FAILED, AlgorithmJob
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.garbage_collection import relaxed_collector
from agentlightning_plugins.shared.processes.job_process import JobTarget
from agentlightning_plugins.shared.token import find_token

logger = logging.getLogger("agentlightning")

_QUICK_DEATH_S: Final = 10.0
_QUICK_DEATHS: Final = 3
"""Maximum number of consecutive deaths of a runner soon after its start and without a rollout."""
_DEATHS: Final = 12
"""Maximum number of other consecutive deaths: two tasks that crash the agent's process are not the runner's fault."""
_LONG_LIFE_S: Final = 600.0
_LONGEST_PAUSE_S: Final = 2.0
_PID_NAMESPACE: Final = Path("/proc/self/ns/pid") if sys.platform == "linux" else None
_UNKNOWN_NAMESPACE: Final = f"-{secrets.token_hex(4)}"
"""The file whose inode identifies this process's PID namespace."""
_active: Final[set[str]] = set()
"""Keys of the supervisors that run in this process."""


class Ending(NamedTuple):
    """The outcome of a runner."""

    how: Literal["done", "worn out", "unloadable", "died"]
    """``unloadable``: the job cannot be loaded, so a restart would fail too."""
    reason: str = ""
    """Why the runner died, or why the job cannot be loaded."""


class Runners(Protocol):
    """Runners of one job, as processes or Ray actors."""

    async def run(self, worker_id: str) -> Ending:
        """Runs one runner to its end. Cancelling once lets rollouts in flight finish; cancelling again stops them."""
        ...


class Supervisor:
    """Keeps ``n_runners`` runners running on one store; replaces those that die, with back-off."""

    def __init__(self, runners: Runners, store: LightningStore, n_runners: int) -> None:
        self._runners = runners
        self._store = store
        self._n_runners = n_runners
        self._key = secrets.token_hex(3)

    async def run(self) -> None:
        """Runs until every runner is done. Cancelling it lets rollouts in flight finish.

        Raises:
            ConfigError: the agent cannot be loaded where runners run.
            RuntimeError: a runner dies repeatedly, and no rollout succeeds in between.
        """
        _active.add(self._key)
        await self._end_previous_workers()
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
            _active.discard(self._key)

    async def _keep_alive(self, name: str) -> None:
        deaths = quick_deaths = n_succeeded = 0
        for restart in itertools.count():
            # A new id for each start: heartbeats of a new process must not renew the leases of the dead one.
            worker_id = f"{name}-{restart}"
            started = time.monotonic()
            ending = await self._runners.run(worker_id)
            if ending.how == "done":
                return
            n_lost = await self._end_worker(worker_id)
            if ending.how == "unloadable":
                raise ConfigError(f"the agent cannot be loaded in a runner process: {ending.reason}")
            if ending.how == "worn out":
                logger.warning("%s was replaced: too many threads of its agents do not stop", worker_id)
                continue
            lived_s, before, n_succeeded = time.monotonic() - started, n_succeeded, await self._count_succeeded()
            if n_succeeded > before or lived_s > _LONG_LIFE_S:
                deaths = quick_deaths = 0
            deaths += 1
            quick_deaths = quick_deaths + 1 if lived_s < _QUICK_DEATH_S and not n_lost else 0
            if quick_deaths > _QUICK_DEATHS or deaths > _DEATHS:
                raise RuntimeError(
                    f"{worker_id} died {deaths} times in a row, and no rollout succeeded in between ({ending.reason}); "
                    "see its output above"
                )
            logger.warning("%s died (%s) with %d rollouts and is restarted", worker_id, ending.reason, n_lost)
            await asyncio.sleep(min(0.1 * 2**deaths, _LONGEST_PAUSE_S))

    async def _count_succeeded(self) -> int:
        """Returns how many rollouts of the run have succeeded; 0 if the store cannot be reached."""
        with contextlib.suppress(StoreError, OSError):
            return (await self._store.query_rollouts(status_in=["succeeded"], limit=1)).total
        return 0

    async def _end_worker(self, worker_id: str) -> int:
        """Releases the attempts of a dead runner before their lease ends; returns how many."""
        with contextlib.suppress(StoreError, OSError):  # the lease expires later
            return await self._store.end_worker(worker_id)
        return 0

    async def _end_previous_workers(self) -> None:
        """Ends the workers of supervisors on this machine that were killed before they could do so."""
        with contextlib.suppress(StoreError, OSError):
            for worker in (await self._store.query_workers()).items:
                match = re.fullmatch(re.escape(_family()) + r"-(\d+)-(\w+)-\d+-\d+", worker.worker_id)
                if match and worker.current_attempt_id is not None and not _is_active(int(match[1]), match[2]):
                    await self._end_worker(worker.worker_id)


async def run_both(algorithm: AlgorithmJob, store: LightningStore, supervisor: Supervisor) -> None:
    """Runs an algorithm with its runners until the algorithm is done or all runners have failed."""
    runners = asyncio.create_task(supervisor.run())
    work = asyncio.ensure_future(algorithm(store))
    reason: str | None = None
    try:
        done, _ = await asyncio.wait({runners, work}, return_when=asyncio.FIRST_COMPLETED)
        if runners in done and runners.exception() is None:  # every runner reached its limit of rollouts
            await work
        if runners in done and runners.exception() is not None:
            reason = RUNNERS_FAILED
        for task in (runners, work):  # if both failed, the runners failed first
            if task in done:
                task.result()
    finally:
        for task in (work, runners):
            task.cancel(reason)
            await asyncio.gather(task, return_exceptions=True)


def _family() -> str:
    """Returns the beginning of the ids of workers whose processes are visible to this process.

    Containers can share a host name; the PID namespace tells them apart.
    """
    try:
        namespace = "" if _PID_NAMESPACE is None else f"-{_PID_NAMESPACE.stat().st_ino:x}"
    except OSError:  # a sandbox hides /proc: only this process knows the state of its runners
        namespace = _UNKNOWN_NAMESPACE
    return f"runner-{socket.gethostname()}{namespace}"


def _is_active(pid: int, key: str) -> bool:
    """Whether a supervisor of this machine still runs. The key distinguishes containers, which reuse process ids."""
    if pid == os.getpid():
        return key in _active
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.asynccontextmanager
async def served(
    store: LightningStore, host: str, port: int, *, is_private: bool, share_environment: bool = False
) -> AsyncIterator[JobTarget]:
    """Serves a store during the context, unless it is served already; yields settings for processes that use it.

    Args:
        store: the store that runners use.
        host: address to bind.
        port: port to bind; 0 selects a free one.
        is_private: only our own runners use the store, so it gets a random token when the environment has none.
        share_environment: the processes have this process's environment. If the store is already served, they take the
            token from the environment, as this process does, and follow changes of the token file.
    """
    from agentlightning.store import LightningStoreClient, LightningStoreServer

    if isinstance(store, LightningStoreClient):
        token = store.given_token if share_environment else store.token
        yield JobTarget.of_this_process(store.urls, token, store.run_id)
        return
    token = find_token()
    if token is None and is_private:
        token = secrets.token_urlsafe(24)
    server = LightningStoreServer(store, host, port, token=token)
    await server.start()
    try:
        with relaxed_collector():
            yield JobTarget.of_this_process(server.endpoint, token, store.run_id)
    finally:
        await server.stop()
