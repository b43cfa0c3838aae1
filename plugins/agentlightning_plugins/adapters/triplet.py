"""The adapters ``triplet``, ``llm-proxy-triplet`` and ``messages``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "adapter", "triplet", "agentlightning.adapter.triplet:TraceToTriplet", summary="prompt, response, reward"
        ),
        Component(
            "adapter",
            "llm-proxy-triplet",
            "agentlightning.adapter.triplet:LlmProxyTraceToTriplet",
            summary="the same, of what the gateway saw",
        ),
        Component(
            "adapter",
            "messages",
            "agentlightning_plugins.chat_history.adapter:TraceToMessages",
            summary="chat histories with tools",
        ),
    ]
