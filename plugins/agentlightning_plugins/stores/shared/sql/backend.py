"""The parts that the backends of SQLite and PostgreSQL share: opening and closing."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from agentlightning.errors import StoreError

COUNT: Final = "SELECT name, sum(number) FROM {}tally GROUP BY name"


class DurableBackend:
    """A backend that is closed once, and only in the process that opened it."""

    durable = True

    def __init__(self, name: str, stop: Callable[..., None], *resources: object) -> None:
        """Registers the resources to close.

        Args:
            name: the name of the database in messages.
            stop: called with ``resources`` when the backend is closed or no longer referenced.
            resources: the arguments of ``stop``, which must not refer to this backend.
        """
        self._name = name
        self._process_id = os.getpid()
        self._stop = weakref.finalize(self, _stop_here, self._process_id, stop, *resources)

    def now(self) -> float:
        """Returns the Unix time by this machine's clock, for a local file; a backend with a server overrides it."""
        return time.time()

    async def close(self) -> None:
        """Finishes the calls that have begun and closes the database."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Closes the database, as ``close`` does, for callers without an event loop."""
        self._stop()

    def _check_open(self) -> None:
        if not self._stop.alive:
            raise StoreError(f"{self._name} is closed")
        if os.getpid() != self._process_id:
            raise StoreError(
                f"{self._name} was opened before this process was forked; connections do not survive that. Open the "
                "store in this process"
            )


def count_all(rows: Iterable[Sequence[Any]]) -> dict[str, int]:
    """Returns the result of ``Backend.count``, given the rows of ``COUNT``."""
    found = {name: int(number) for name, number in rows}
    return {name: found.get(name, 0) for name in ("rollouts", "attempts", "spans", "resources", "workers")}


def _stop_here(process_id: int, stop: Callable[..., None], *resources: object) -> None:
    if os.getpid() == process_id:  # a forked child has neither the threads nor a right to the connections
        stop(*resources)
