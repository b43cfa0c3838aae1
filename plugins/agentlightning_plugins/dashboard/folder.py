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
"""Number of newest directories whose workers and runs are listed."""


class RunFolder:
    """The run directories of a folder, such as ``runs/``.

    The run ``default`` of a directory has the name of the directory as its id, and another run ``x`` has ``name:x``. Of
    directories beside the newest 50, only ``default`` is listed. Has the methods of ``LightningStore`` that are about
    several runs; ``with_run`` returns the store of a run.
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
        """Returns the names of the run directories, in the order in which the runs began."""
        records = [file.with_name("run.json") for file in self._folder.glob("*/store.db")]
        began = {file.parent.name: file.stat().st_mtime for file in records if file.is_file()}
        return sorted(filter(RUN_ID.fullmatch, began), key=began.__getitem__)

    def now(self) -> float:
        return time.time()

    def with_run(self, run_id: str) -> LightningStore:
        names = self._names()
        name, _, inner = (run_id, "", "") if run_id in names else run_id.partition(":")
        if name not in names:
            raise NotFoundError(f"{self._folder} has no run {run_id!r}; runs: {', '.join(names)}")
        if name not in self._stores:
            self._stores[name] = create_store(str(self._folder / name))
        return self._stores[name].with_run(inner) if inner else self._stores[name]

    async def _read(self, name: str) -> list[Run]:
        """Returns the runs of a directory, ``default`` first; empty if it cannot be read."""
        try:
            store = self.with_run(name)
            runs = {run.run_id: run for run in await store.query_runs()}
            own = runs.pop(store.run_id, None) or await find_run(store)
        except LightningError as error:
            logger.warning("%s cannot be shown: %s", self._folder / name, error)
            return []
        others = [run.model_copy(update={"run_id": f"{name}:{run.run_id}"}) for run in runs.values()]
        return [*([] if own is None else [own.model_copy(update={"run_id": name})]), *others]

    async def query_runs(self, *, limit: int = -1, offset: int = 0) -> PaginatedResult[Run]:
        names = self._names()
        newest = [run for name in names[-_NEWEST:] for run in await self._read(name)]
        places: list[str | Run] = [*names[:-_NEWEST], *newest]
        items = []
        for place in places[offset : None if limit < 0 else offset + limit]:
            items += [place] if isinstance(place, Run) else (await self._read(place))[:1]
        return PaginatedResult[Run](items=items, limit=limit, offset=offset, total=len(places))

    async def find_open_runs(self) -> list[str]:
        runs = [run for name in self._names()[-_NEWEST:] for run in await self._read(name)]
        return [run.run_id for run in runs if run.status == "running"]

    async def query_workers(self, **query: Any) -> PaginatedResult[Worker]:
        stores = {name: self.with_run(name) for name in self._names()[-_NEWEST:] if await self._read(name)}
        pages = [await store.query_workers(**query) for store in stores.values()]
        items = [worker for page in pages for worker in page]
        total = sum(page.total for page in pages)
        return PaginatedResult[Worker](items=items, limit=query.get("limit", -1), offset=0, total=total)

    async def statistics(self) -> dict[str, float]:
        counts = [Counter(await store.statistics()) for store in self._stores.values()]
        return {**sum(counts, Counter()), "uptime": max((each["uptime"] for each in counts), default=0.0)}

    async def close(self) -> None:
        await asyncio.gather(*[store.close() for store in self._stores.values()])
