"""The running attempts of a killed process."""

from __future__ import annotations

from pathlib import Path

import agentlightning as agl
from tests.waiting import until


async def end_leases(file: Path) -> None:
    """Ends the leases of all running attempts, for which a resumed run would wait a minute."""
    store = agl.SqliteLightningStore(file, lease_s=0.01, watchdog_interval_s=0.01)

    async def is_quiet() -> bool:
        return not await store.query_rollouts(status_in=["preparing", "running"])

    try:
        await until(is_quiet)
    finally:
        await store.close()
