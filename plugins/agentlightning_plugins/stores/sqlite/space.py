"""Returns the space of deleted records to the file system."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from agentlightning_plugins.stores.sqlite.schema import connect, explain

_KEPT_PAGES: Final = 1024
"""Free pages that stay in the file, for the next records: 4 MiB."""
_STEP_PAGES: Final = 256
"""Number of pages that one step returns; writes wait a few milliseconds for it."""


def shrink(connection: sqlite3.Connection) -> None:
    """Returns some of the excess free pages to the file system."""
    free = connection.execute("PRAGMA freelist_count").fetchone()[0] - _KEPT_PAGES
    if free > 0:
        connection.executescript(f"PRAGMA incremental_vacuum({min(free, _STEP_PAGES)})")  # execute() does one page


def compact(path: Path, busy_timeout_s: float) -> tuple[int, int]:
    """Rewrites the file without free pages; returns its size before and after, in bytes.

    Raises:
        StoreError: the disk is full, or other processes keep the file locked; the file is not changed.
    """
    before = _size(path)
    try:
        with closing(connect(path, busy_timeout_s)) as connection:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error as error:
        raise explain(error, path) from error
    return before, _size(path)


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, path.with_name(f"{path.name}-wal")) if each.exists())
