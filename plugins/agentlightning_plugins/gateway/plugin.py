"""The gateway, the APIs that it speaks, and the model servers that it knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import Component, hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "gateway",
            "gateway",
            "agentlightning_plugins.gateway.proxy:LLMProxy",
            summary="OpenAI-compatible, records every call",
        ),
        Component(
            "dialect",
            "openai-chat",
            "agentlightning_plugins.gateway.dialects.openai:ChatCompletions",
            summary="Chat Completions",
        ),
        Component(
            "dialect",
            "openai-completions",
            "agentlightning_plugins.gateway.dialects.openai:Completions",
            summary="Completions",
        ),
        Component(
            "dialect",
            "openai-embeddings",
            "agentlightning_plugins.gateway.dialects.embeddings:Embeddings",
            summary="Embeddings",
        ),
        Component(
            "dialect",
            "openai-responses",
            "agentlightning_plugins.gateway.dialects.responses:Responses",
            summary="Responses",
        ),
        Component(
            "dialect",
            "anthropic-messages",
            "agentlightning_plugins.gateway.dialects.messages:Messages",
            summary="Anthropic Messages",
        ),
        Component(
            "dialect",
            "anthropic-count-tokens",
            "agentlightning_plugins.gateway.dialects.messages:CountTokens",
            summary="tokens of Messages",
        ),
        Component(
            "provider",
            "openai-compatible",
            "agentlightning_plugins.gateway.backends.provider:OpenAICompatible",
            summary="the default",
        ),
        Component(
            "provider", "vllm", "agentlightning_plugins.gateway.backends.provider:VLLM", summary="vLLM, with token ids"
        ),
        Component(
            "provider", "openai", "agentlightning_plugins.gateway.backends.provider:OpenAI", summary="OpenAI itself"
        ),
        Component(
            "provider",
            "anthropic",
            "agentlightning_plugins.gateway.backends.provider:Anthropic",
            summary="Anthropic itself",
        ),
        Component(
            "provider",
            "litellm",
            "agentlightning_plugins.gateway.backends.litellm:LiteLLM",
            extra="litellm",
            summary="any that litellm knows",
        ),
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_plugins.gateway.command import command

    cli.add_command(command)
