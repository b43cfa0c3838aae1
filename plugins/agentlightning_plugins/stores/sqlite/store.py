"""``SqliteLightningStore``: the engine over one SQLite file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Self

from agentlightning.errors import ConfigError
from agentlightning.store.engine import BackendStore
from agentlightning.store.url import hide_password
from agentlightning.types import DEFAULT_RUN_ID
from agentlightning_plugins.stores.sqlite.backend import SqliteBackend
from agentlightning_plugins.stores.sqlite.space import compact


class SqliteLightningStore(BackendStore):
    """A store in one file: acknowledged writes survive SIGKILL and power failure.

    Several processes of one machine may open the same file. Not for network file systems, whose locks and shared memory
    SQLite cannot rely on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        run_id: str = DEFAULT_RUN_ID,
        *,
        lease_s: float = 60.0,
        watchdog_interval_s: float | None = 1.0,
        busy_timeout_s: float = 30.0,
    ) -> None:
        """Opens the file, or creates it with its folders. A file of an older version is migrated.

        Args:
            path: the file; SQLite keeps two more next to it (``-wal`` and ``-shm``) while it is open.
            run_id: the run that this object sees.
            lease_s: an attempt is lost after this time without a span or a heartbeat.
            watchdog_interval_s: how late an overdue attempt may be ended; None leaves this to other processes.
            busy_timeout_s: how long a write waits for other processes before it fails.

        Raises:
            ConfigError: the file is not a store, or was written by a newer version; it is not changed.
            StoreError: the file cannot be opened.
        """
        if not busy_timeout_s > 0:
            raise ConfigError(f"busy_timeout_s={busy_timeout_s}; it must be above 0")
        self._path, self._busy_timeout_s = Path(path), busy_timeout_s
        backend = SqliteBackend(Path(path), busy_timeout_s=busy_timeout_s)
        try:
            super().__init__(backend, run_id, lease_s=lease_s, watchdog_interval_s=watchdog_interval_s)
        except BaseException:
            backend.stop()
            raise

    async def compact(self) -> tuple[int, int]:
        """Rewrites the file without the space of deleted records; returns its size before and after, in bytes.

        Other writers wait meanwhile. The call needs as much free disk space as the file occupies.

        Raises:
            StoreError: the disk is full, or other processes keep the file locked; the file is not changed.
        """
        return await asyncio.to_thread(compact, self._path, self._busy_timeout_s)

    @classmethod
    def from_url(cls, url: str, *, run_id: str = DEFAULT_RUN_ID, token: str | None = None) -> Self:
        """Opens ``sqlite:///relative/path`` or ``sqlite:////absolute/path``.

        Raises:
            ConfigError: no path, a host, or a token.
        """
        host, slash, path = url.partition("://")[2].partition("/")
        if host or not slash or not path or path == ":memory:":
            raise ConfigError(
                f"store {hide_password(url)!r} names no file; write sqlite:///store.db for one in the working "
                "directory, sqlite:////var/lib/store.db for an absolute path, or memory:// for none"
            )
        if token is not None:
            raise ConfigError("sqlite:/// takes no token: the permissions of the file control access")
        return cls(path, run_id)
