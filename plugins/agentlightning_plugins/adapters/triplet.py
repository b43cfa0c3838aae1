"""The adapters ``triplet`` and ``messages``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    triplet, messages = (
        "agentlightning.adapter.triplet:TraceToTriplet",
        "agentlightning_plugins.shared.chat_history:TraceToMessages",
    )
    return [
        Component("adapter", "triplet", triplet, summary="prompt, response, reward"),
        Component("adapter", "messages", messages, summary="chat histories with tools"),
    ]
