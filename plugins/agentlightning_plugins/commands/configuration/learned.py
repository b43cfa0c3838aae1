"""The resources that a run learned, for commands that run its agent once more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from agentlightning.errors import NotFoundError
from agentlightning.resources import Resource
from agentlightning_algorithms.trained_model.checkpoint import list_checkpoints
from agentlightning_algorithms.trained_model.record import read_training
from agentlightning_algorithms.trained_model.serving import serve_model
from agentlightning_plugins.commands.terminal import open_store


@contextlib.contextmanager
def learned_resources(where: str | None) -> Iterator[dict[str, Resource]]:
    """Yields the latest resources of a run or store; the model whose weights a run trained is served meanwhile.

    Args:
        where: a URL, or the directory of a run; None yields nothing.

    Raises:
        NotFoundError: the store has no resources.
        LightningError: the model cannot be served.
    """
    if where is None:
        yield {}
        return
    run = Path(where)
    if read_training(run) is None:
        latest = asyncio.run(_read_latest(where))
        if latest is None:
            raise NotFoundError(f"{where} contains no resources")
        yield latest
        return
    # A run whose store was in memory or elsewhere has left the model only.
    learned = asyncio.run(_read_latest(where)) if (run / "store.db").is_file() else None
    with served_model(run) as models:
        yield {**(learned or {}), **models}


def saved_weights(run: Path) -> list[str] | None:
    """The names of the checkpoints that a run saved; None if it does not train weights.

    Raises:
        ConfigError: its record is damaged.
    """
    return None if read_training(run) is None else list(list_checkpoints(run))


@contextlib.contextmanager
def served_model(run: Path | None, checkpoint: str | None = None) -> Iterator[dict[str, Resource]]:
    """Yields the resources of the model whose weights a run trained, while it is served; nothing for None.

    Args:
        run: its directory.
        checkpoint: ``best``, ``latest`` or a step; None: the first of best and latest.

    Raises:
        LightningError: the model cannot be served.
    """
    if run is None:
        yield {}
        return
    with serve_model(str(run), checkpoint) as served:
        yield served.resources()


async def _read_latest(where: str) -> dict[str, Resource] | None:
    store = open_store(where)
    try:
        latest = await store.get_latest_resources()
    finally:
        await store.close()
    return None if latest is None else dict(latest.resources)
