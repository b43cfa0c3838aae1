"""A gateway between the real ``openai`` client and a scripted model server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from agentlightning.resources import ProxyLLM
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.openai_server import ScriptedOpenAI
from agentlightning.types import AttemptedRollout, Span
from agentlightning_plugins.gateway import LLMProxy
from agentlightning_plugins.memory_store import InMemoryLightningStore

PROVIDER_KEY = "sk-the-real-provider-key"
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}},
}


@dataclass
class Case:
    """One gateway at work."""

    proxy: LLMProxy
    store: LightningStore
    any_client: AsyncOpenAI

    def client(self, endpoint: str) -> AsyncOpenAI:
        """A client that does not try again; all share one pool, because a new one costs 50 ms."""
        return self.any_client.with_options(base_url=endpoint)

    async def start(self) -> tuple[AttemptedRollout, AsyncOpenAI]:
        """A rollout under way, and a client whose calls belong to it."""
        rollout = await self.store.start_rollout({"task": 1})
        resource = self.proxy.as_resource(model="m")
        assert isinstance(resource, ProxyLLM)
        llm = resource.with_attempted_rollout(rollout)
        return rollout, self.client(llm.get_base_url())

    async def spans(self, rollout: AttemptedRollout) -> list[Span]:
        await self.proxy.flush()
        return list(await self.store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id))

    async def span(self, rollout: AttemptedRollout) -> Span:
        (span,) = await self.spans(rollout)
        return span


def entry(endpoint: str, **more: Any) -> Mapping[str, Any]:
    return {"model": "m", "endpoint": endpoint, "api_key": PROVIDER_KEY, **more}


@contextlib.asynccontextmanager
async def gateway(
    *servers: ScriptedOpenAI, model_list: list[Any] | None = None, **settings: Any
) -> AsyncIterator[Case]:
    store = InMemoryLightningStore()
    models = [entry(server.endpoint) for server in servers] if model_list is None else model_list
    proxy = LLMProxy(model_list=models, store=store, **settings)
    await proxy.start()
    try:
        async with AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="the-agents-own-key", max_retries=0) as client:
            yield Case(proxy, store, client)
    finally:
        await proxy.stop()
        await store.close()
