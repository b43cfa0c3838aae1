"""Serves the store to the runners of a run."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncIterator

from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.garbage_collection import relaxed_collector
from agentlightning_plugins.strategies.processes.job_process import JobTarget


@contextlib.asynccontextmanager
async def served(store: LightningStore, host: str, port: int, *, is_private: bool) -> AsyncIterator[JobTarget]:
    """Serves a store during the context, unless it is served already; yields the settings of processes that use it.

    Args:
        store: the store that runners use.
        host: address to bind.
        port: port to bind; 0 selects a free one.
        is_private: only our own runners use the store, so it gets a random token when AGL_TOKEN is not set.
    """
    from agentlightning.store import LightningStoreClient, LightningStoreServer

    if isinstance(store, LightningStoreClient):
        yield JobTarget.of_this_process(store.urls, store.token, store.run_id)
        return
    token = os.environ.get("AGL_TOKEN") or None
    if token is None and is_private:
        token = secrets.token_urlsafe(24)
    server = LightningStoreServer(store, host, port, token=token)
    await server.start()
    try:
        with relaxed_collector():
            yield JobTarget.of_this_process(server.endpoint, token, store.run_id)
    finally:
        await server.stop()
