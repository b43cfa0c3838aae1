"""``LightningStore`` over any ``Backend``: the semantics of the contract, written once."""

from __future__ import annotations

import asyncio
import time
from typing import Self

from agentlightning.errors import ConfigError
from agentlightning.store.attempt import AttemptMethods
from agentlightning.store.backend import Backend
from agentlightning.store.protocol import StoreCapabilities
from agentlightning.store.queue import QueueMethods
from agentlightning.store.retention import Retention
from agentlightning.store.rollout import RolloutMethods
from agentlightning.store.run import RunMethods
from agentlightning.store.snapshot import ResourceMethods
from agentlightning.store.span import SpanMethods
from agentlightning.store.transaction import Database
from agentlightning.store.worker import WorkerMethods
from agentlightning.types import DEFAULT_RUN_ID


class BackendStore(
    QueueMethods, RolloutMethods, AttemptMethods, SpanMethods, ResourceMethods, WorkerMethods, RunMethods
):
    """A store over a database. Safe to use from any thread and event loop, as the backend is.

    Whoever opens a database this way owns it together with its other openers: a daemon thread enforces timeouts,
    unresponsiveness and leases. It starts with the first attempt, or at once where a durable database may hold attempts
    of processes that are gone.
    """

    def __init__(
        self,
        backend: Backend,
        run_id: str = DEFAULT_RUN_ID,
        *,
        lease_s: float = 60.0,
        watchdog_interval_s: float | None = 1.0,
    ) -> None:
        """Opens a store.

        Args:
            backend: the database; ``close`` closes it.
            run_id: the run that this object sees.
            lease_s: an attempt of a worker of which neither a span nor a heartbeat was seen for this long is lost.
            watchdog_interval_s: how late the end of an attempt may be enforced; None leaves enforcing to others.
        """
        if not run_id:
            raise ConfigError("run_id is empty; leave it out for the run 'default'")
        if not lease_s > 0:
            raise ConfigError(f"lease_s={lease_s}; it must be above 0")
        self.run_id = run_id
        self._database = Database(backend, lease_s, watchdog_interval_s)
        if backend.durable and self._database.watchdog is not None:
            self._database.watchdog.start()

    def with_run(self, run_id: str) -> Self:
        if not run_id:
            raise ConfigError("run_id is empty; the unnamed run is called 'default'")
        view = self.__class__.__new__(self.__class__)  # shares everything but the run, also of a subclass
        view.__dict__.update(self.__dict__, run_id=run_id)
        return view

    def retain(self, retention: Retention) -> None:
        """Has the watchdog delete ended rollouts, of every run, that a policy does not keep.

        Raises:
            ConfigError: this store leaves enforcing to others.
        """
        if self._database.watchdog is None:
            raise ConfigError("watchdog_interval_s=None: this store enforces nothing; retain in the one that does")
        self._database.watchdog.retention = retention
        self._database.watchdog.start()

    @property
    def capabilities(self) -> StoreCapabilities:
        return {"thread_safe": True, "durable": self._database.backend.durable, "otlp_traces": False}

    def otlp_traces_endpoint(self) -> str | None:
        return None

    async def statistics(self) -> dict[str, float]:
        counts = await self._database.backend.count()
        return {**counts, "uptime": time.monotonic() - self._database.opened_at}

    async def close(self) -> None:
        """Ends every wait, stops the watchdog and closes the database. Closing twice is harmless."""
        database = self._database
        database.waiters.close()
        if database.watchdog is not None:
            await asyncio.to_thread(database.watchdog.stop)  # it may be in the middle of a scan
        loop = asyncio.get_running_loop()
        if here := [task for task in tuple(database.background) if task.get_loop() is loop]:
            await asyncio.wait(here)
        database.stop_watching()
        await database.backend.close()
