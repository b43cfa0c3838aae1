"""Serves the store to the runners of a run."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator

from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.garbage_collection import relaxed_collector
from agentlightning_plugins.shared.processes.job_process import JobTarget
from agentlightning_plugins.shared.token import find_token


@contextlib.asynccontextmanager
async def served(
    store: LightningStore, host: str, port: int, *, is_private: bool, share_environment: bool = False
) -> AsyncIterator[JobTarget]:
    """Serves a store during the context, unless it is served already; yields settings for processes that use it.

    Args:
        store: the store that runners use.
        host: address to bind.
        port: port to bind; 0 selects a free one.
        is_private: only our own runners use the store, so it gets a random token when the environment has none.
        share_environment: the processes have this process's environment. If the store is already served, they take the
            token from the environment, as this process does, and follow changes of the token file.
    """
    from agentlightning.store import LightningStoreClient, LightningStoreServer

    if isinstance(store, LightningStoreClient):
        token = store.given_token if share_environment else store.token
        yield JobTarget.of_this_process(store.urls, token, store.run_id)
        return
    token = find_token()
    if token is None and is_private:
        token = secrets.token_urlsafe(24)
    server = LightningStoreServer(store, host, port, token=token)
    await server.start()
    try:
        with relaxed_collector():
            yield JobTarget.of_this_process(server.endpoint, token, store.run_id)
    finally:
        await server.stop()
