"""The adapters ``triplet``, ``llm-proxy-triplet`` and ``messages``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    triplet, message = "agentlightning.adapter.triplet", "agentlightning_plugins.chat_history.adapter"
    gateway = "the same, of what the gateway saw"
    return [
        Component("adapter", "triplet", f"{triplet}:TraceToTriplet", summary="prompt, response, reward"),
        Component("adapter", "llm-proxy-triplet", f"{triplet}:LlmProxyTraceToTriplet", summary=gateway),
        Component("adapter", "messages", f"{message}:TraceToMessages", summary="chat histories with tools"),
    ]
