"""Adapters: turn the spans of an attempt into training data."""

from typing import TYPE_CHECKING

from agentlightning.facade import resolve_lazily

if TYPE_CHECKING:
    from agentlightning.adapter.adapter import Adapter as Adapter
    from agentlightning.adapter.adapter import TraceAdapter as TraceAdapter
    from agentlightning.adapter.message import TraceToMessages as TraceToMessages
    from agentlightning.adapter.triplet import LlmProxyTraceToTriplet as LlmProxyTraceToTriplet
    from agentlightning.adapter.triplet import RewardMatchPolicy as RewardMatchPolicy
    from agentlightning.adapter.triplet import TracerTraceToTriplet as TracerTraceToTriplet
    from agentlightning.adapter.triplet import TraceToTriplet as TraceToTriplet

__all__ = [
    "Adapter",
    "LlmProxyTraceToTriplet",
    "RewardMatchPolicy",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTriplet",
    "TracerTraceToTriplet",
]

__getattr__ = resolve_lazily(
    __name__,
    {
        "Adapter": "agentlightning.adapter.adapter",
        "LlmProxyTraceToTriplet": "agentlightning.adapter.triplet",
        "RewardMatchPolicy": "agentlightning.adapter.triplet",
        "TraceAdapter": "agentlightning.adapter.adapter",
        "TraceToMessages": "agentlightning.adapter.message",
        "TraceToTriplet": "agentlightning.adapter.triplet",
        "TracerTraceToTriplet": "agentlightning.adapter.triplet",
    },
)
