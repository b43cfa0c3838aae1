"""Runs, and their rollouts by status."""

from __future__ import annotations

import asyncio
from typing import Any, Final, get_args

from agentlightning.store.protocol import LightningStore
from agentlightning.types import RolloutStatus, Run

_NEWEST: Final = 50
"""Number of newest runs that are searched for running ones."""


async def count_rollouts(store: LightningStore) -> dict[str, int]:
    """Returns the number of rollouts of a run by status."""
    statuses = get_args(RolloutStatus)
    pages = await asyncio.gather(*(store.query_rollouts(status_in=[status], limit=0) for status in statuses))
    return {status: page.total for status, page in zip(statuses, pages, strict=True)}


async def find_run(store: LightningStore) -> Run | None:
    """Returns the run that a store sees, even one that was never created but has rollouts."""
    run = await store.get_run_by_id(store.run_id)
    if run is None and (await store.query_rollouts(limit=0)).total:
        return Run(
            run_id=store.run_id, name=store.run_id, created_at=(await store.query_rollouts(limit=1))[0].start_time
        )
    return run


async def find_newest_runs(store: LightningStore) -> list[Run]:
    """Returns the newest runs of a store and the run that it sees: running ones first, then the newest first."""
    total = (await store.query_runs(limit=0)).total
    runs = list(await store.query_runs(offset=max(0, total - _NEWEST)))[::-1]
    if all(run.run_id != store.run_id for run in runs) and (own := await find_run(store)) is not None:
        runs.append(own)
    return sorted(runs, key=lambda run: run.status != "running")


def describe_run(run: Run) -> dict[str, Any]:
    """Returns the fields of a run, and the name of its algorithm."""
    algorithm = run.config.get("algorithm", "")
    name = algorithm.get("name", "") if isinstance(algorithm, dict) else str(algorithm)
    return {**run.model_dump(mode="json", exclude={"scores"}), "algorithm": name}
