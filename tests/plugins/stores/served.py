"""A served memory store and raw requests to it, for the tests of the server."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from pydantic_core import to_json

from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.waiting import until


@asynccontextmanager
async def serve(token: str | None = None) -> AsyncIterator[tuple[LightningStoreServer, LightningStore]]:
    """Starts a server over a new memory store and yields the server and the store."""
    store = InMemoryLightningStore()
    async with LightningStoreServer(store, port=0, token=token) as server:
        yield server, store
    await store.close()


async def claim(store: LightningStore, task: Any = "task") -> AttemptedRollout:
    """Enqueues a rollout and returns it as a worker has claimed it."""
    await store.enqueue_rollout(task)
    claimed = await store.dequeue_rollout("worker")
    assert claimed is not None
    return claimed


async def ask(
    server: LightningStoreServer,
    method: str,
    path: str,
    body: Any = None,
    *,
    token: str | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    """Sends a request to a full path and returns the status and decoded answer; a body of bytes is sent as it is."""
    content = None if body is None else io.BytesIO(body if isinstance(body, bytes) else to_json(body))
    shown = {"content-type": "application/json", **(headers or {})}
    if token is not None:
        shown["authorization"] = f"Bearer {token}"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.endpoint + path, headers=shown, data=content) as response,
    ):
        is_json = response.content_type == "application/json"
        return response.status, await response.json() if is_json else await response.read()


async def until_gauge(server: LightningStoreServer, gauge: str, value: float) -> None:
    """Waits until ``GET /metrics`` shows this value of a gauge without labels."""

    async def is_shown() -> bool:
        return f"\n{gauge} {value:.1f}\n" in (await ask(server, "GET", "/metrics"))[1].decode()

    await until(is_shown)
