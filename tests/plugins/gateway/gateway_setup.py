"""A gateway between the real ``openai`` client and a scripted model server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

from agentlightning.resources import ProxyLLM
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Span
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.call import ModelCall, TraceContext
from agentlightning_plugins.gateway.dialects.dialect import Dialect
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.gateway.relay import StreamReader
from agentlightning_plugins.shared.scripted_model.server import ScriptedOpenAI
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.waiting import until

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

PROVIDER_KEY = "sk-the-real-provider-key"
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}},
}


@dataclass
class Case:
    """A running gateway with its store and clients."""

    proxy: LLMProxy
    store: LightningStore
    any_client: AsyncOpenAI
    stack: contextlib.AsyncExitStack
    any_anthropic_client: AsyncAnthropic | None = None

    def client(self, endpoint: str) -> AsyncOpenAI:
        """Returns a client without retries; all clients share one connection pool, because a new pool costs 50 ms."""
        return self.any_client.with_options(base_url=endpoint)

    async def anthropic_client(self, client: AsyncOpenAI) -> AsyncAnthropic:
        """Returns an Anthropic client for the same attempt as an OpenAI client."""
        from anthropic import AsyncAnthropic  # takes a second to import, which few tests need

        if self.any_anthropic_client is None:
            new = AsyncAnthropic(base_url="http://127.0.0.1:1", api_key="the-agents-own-key", max_retries=0)
            self.any_anthropic_client = await self.stack.enter_async_context(new)
        root = str(client.base_url).removesuffix("/v1/")
        return self.any_anthropic_client.with_options(base_url=f"{root}/anthropic")

    async def start(self, **options: Any) -> tuple[AttemptedRollout, AsyncOpenAI]:
        """Starts a rollout and returns it with a client whose calls belong to it."""
        rollout = await self.store.start_rollout({"task": 1}, **options)
        resource = self.proxy.as_resource(model="m")
        assert isinstance(resource, ProxyLLM)
        llm = resource.with_attempted_rollout(rollout)
        return rollout, self.client(llm.get_base_url())

    async def spans(self, rollout: AttemptedRollout) -> list[Span]:
        await self.proxy.flush()
        return list(await self.store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id))

    async def eventual_span(self, rollout: AttemptedRollout) -> Span:
        """Waits for the span of a call whose end the test cannot await."""
        await until(lambda: self.spans(rollout))
        return (await self.spans(rollout))[0]

    async def span(self, rollout: AttemptedRollout) -> Span:
        (span,) = await self.spans(rollout)
        return span


def entry(endpoint: str, **more: Any) -> Mapping[str, Any]:
    return {"model": "m", "endpoint": endpoint, "api_key": PROVIDER_KEY, **more}


def stream_reader(dialect: Dialect, body: Mapping[str, Any]) -> tuple[ModelCall, StreamReader]:
    """Returns a recorded call of a dialect and the reader of the stream that answers it."""
    call = ModelCall(("r", "a"), dialect, body, "m", TraceContext.from_header(None))
    (backend,) = ModelTable([entry("http://127.0.0.1:1/v1")]).backends
    return call, StreamReader(call, call.prepare(backend))


@contextlib.asynccontextmanager
async def gateway(
    *servers: ScriptedOpenAI, model_list: list[Any] | None = None, provider: str | None = None, **settings: Any
) -> AsyncIterator[Case]:
    store = InMemoryLightningStore(lease_s=86_400)  # longer than any test, because no runner sends heartbeats
    settings.setdefault("require_keys", False)  # the clients of ``Case.start`` have no keys of attempts
    more = {} if provider is None else {"provider": provider}
    models = [entry(server.endpoint, **more) for server in servers] if model_list is None else model_list
    proxy = LLMProxy(model_list=models, store=store, **settings)
    await proxy.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            new = AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="the-agents-own-key", max_retries=0)
            yield Case(proxy, store, await stack.enter_async_context(new), stack)
    finally:
        await proxy.stop()
        await store.close()


async def waiting(proxy: LLMProxy) -> bool:
    """Whether a call waits for the end of a pause."""
    return bool((await proxy.status())["waiting"])
