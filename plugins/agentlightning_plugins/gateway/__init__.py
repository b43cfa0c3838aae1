"""The gateway, the dialects and providers it supports, the adapter of its spans, and ``agl gateway``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from agentlightning.plugin.hookspecs import Component, Kind, hookimpl
from agentlightning_plugins.shared.lazy import lazy_commands

_COMPONENTS: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("gateway", "gateway", "proxy:LLMProxy", "OpenAI-compatible, records every call"),
    ("gateway", "remote", "remote:RemoteGateway", "one that `agl gateway` serves; name it by its URL"),
    ("adapter", "llm-proxy-triplet", "adapter:LlmProxyTraceToTriplet", "as triplet, from the gateway's spans only"),
    ("dialect", "openai-chat", "dialects.openai:ChatCompletions", "Chat Completions"),
    ("dialect", "openai-completions", "dialects.openai:TextCompletions", "Completions"),
    ("dialect", "openai-embeddings", "dialects.openai:Embeddings", "Embeddings"),
    ("dialect", "openai-responses", "dialects.responses:Responses", "Responses"),
    ("dialect", "anthropic-messages", "dialects.messages:Messages", "Anthropic Messages"),
    ("dialect", "anthropic-count-tokens", "dialects.messages:CountTokens", "tokens of Messages"),
    ("dialect", "google-generate-content", "dialects.google:GenerateContent", "Google's generateContent"),
    ("dialect", "google-stream-generate-content", "dialects.google:StreamGenerateContent", "Google's streams"),
    ("dialect", "google-count-tokens", "dialects.google:GoogleCountTokens", "tokens of generateContent"),
    ("provider", "openai-compatible", "backends.provider:OpenAICompatible", "the default"),
    ("provider", "vllm", "backends.provider:VLLM", "vLLM, with token ids"),
    ("provider", "openai", "backends.provider:OpenAI", "OpenAI itself"),
    ("provider", "anthropic", "backends.provider:Anthropic", "Anthropic itself"),
    ("provider", "litellm", "backends.litellm:LiteLLM", "any provider that litellm supports"),
)


@hookimpl
def kinds() -> list[Kind]:
    return [
        Kind("dialect", "agentlightning_plugins.gateway.dialects.dialect:Dialect", "an API that agents speak"),
        Kind("provider", "agentlightning_plugins.gateway.backends.provider:Provider", "the client of a model server"),
    ]


@hookimpl
def components() -> Iterable[Component]:
    package = "agentlightning_plugins.gateway"
    return [
        Component(kind, name, f"{package}.{target}", "litellm" if name == "litellm" else None, summary)
        for kind, name, target, summary in _COMPONENTS
    ]


add_commands = lazy_commands("agentlightning_plugins.gateway.command:command")
