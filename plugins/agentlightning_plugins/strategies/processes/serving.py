"""The store, served to the runners of a run."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncIterator

from agentlightning.store.protocol import LightningStore


@contextlib.asynccontextmanager
async def served(
    store: LightningStore, host: str, port: int, *, is_private: bool
) -> AsyncIterator[tuple[str, str | None]]:
    """Serves a store for as long as the context lasts, unless it is served already; gives URL and token.

    Args:
        store: what runners are to reach.
        host: where it is served.
        port: 0 takes a free one.
        is_private: whether nobody but our own runners has business with it: without AGL_TOKEN, it gets a random token.
    """
    from agentlightning.store import LightningStoreClient, LightningStoreServer

    if isinstance(store, LightningStoreClient):
        yield store.url, store.token
        return
    token = os.environ.get("AGL_TOKEN")
    if token is None and is_private:
        token = secrets.token_urlsafe(24)
    server = LightningStoreServer(store, host, port, token=token)
    await server.start()
    try:
        yield server.endpoint, token
    finally:
        await server.stop()
