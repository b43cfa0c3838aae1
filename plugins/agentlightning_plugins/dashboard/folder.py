"""The run directories of a folder, read as one store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import ConfigError, LightningError, NotFoundError
from agentlightning.store.check import RUN_ID
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.types import PaginatedResult, Run, Worker
from agentlightning_plugins.shared.monitoring.runs import find_run

logger = logging.getLogger("agentlightning")
_NEWEST: Final = 50
"""Number of newest runs whose workers are listed, and that are searched for work."""


class RunFolder:
    """The run directories of a folder, such as ``runs/``: each is a run, whose id is the name of its directory.

    Has the methods of ``LightningStore`` that are about several runs; ``with_run`` returns the store of a directory.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder has no run directory."""
        self._folder = folder
        self._stores: dict[str, LightningStore] = {}
        names = self._names()
        if not names:
            raise ConfigError(f"{folder} has no store.db and no run directory; give the directory of a run, or of runs")
        self.run_id = names[-1]

    def _names(self) -> list[str]:
        """Returns the names of the run directories, those that began first at the beginning."""
        records = [file.with_name("run.json") for file in self._folder.glob("*/store.db")]
        began = {file.parent.name: file.stat().st_mtime for file in records if file.is_file()}
        return sorted(filter(RUN_ID.fullmatch, began), key=began.__getitem__)

    def now(self) -> float:
        return time.time()

    def with_run(self, run_id: str) -> LightningStore:
        if run_id not in self._stores:
            if run_id not in self._names():
                raise NotFoundError(f"{self._folder} has no run {run_id!r}; runs: {', '.join(self._names())}")
            self._stores[run_id] = create_store(str(self._folder / run_id))
        return self._stores[run_id]

    async def query_runs(self, *, limit: int = -1, offset: int = 0) -> PaginatedResult[Run]:
        names = self._names()
        items = []
        for name in names[offset : None if limit < 0 else offset + limit]:
            try:
                run = await find_run(self.with_run(name))
            except LightningError as error:
                logger.warning("%s cannot be shown: %s", self._folder / name, error)
                continue
            if run is not None:
                items.append(run.model_copy(update={"run_id": name}))
        return PaginatedResult[Run](items=items, limit=limit, offset=offset, total=len(names))

    async def find_open_runs(self) -> list[str]:
        return [run.run_id for run in await self._newest() if run.status == "running"]

    async def _newest(self) -> PaginatedResult[Run]:
        return await self.query_runs(offset=max(0, len(self._names()) - _NEWEST))

    async def query_workers(self, **query: Any) -> PaginatedResult[Worker]:
        pages = [await self.with_run(run.run_id).query_workers(**query) for run in await self._newest()]
        items = [worker for page in pages for worker in page]
        total = sum(page.total for page in pages)
        return PaginatedResult[Worker](items=items, limit=query.get("limit", -1), offset=0, total=total)

    async def statistics(self) -> dict[str, float]:
        counts = [Counter(await store.statistics()) for store in self._stores.values()]
        return {**sum(counts, Counter()), "uptime": max((each["uptime"] for each in counts), default=0.0)}

    async def close(self) -> None:
        await asyncio.gather(*[store.close() for store in self._stores.values()])
