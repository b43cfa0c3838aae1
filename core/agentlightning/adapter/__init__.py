"""Adapters: turn the spans of an attempt into training data."""

from typing import TYPE_CHECKING

from agentlightning.facade import resolve_lazily

if TYPE_CHECKING:
    from agentlightning.adapter.adapter import Adapter as Adapter
    from agentlightning.adapter.adapter import TraceAdapter as TraceAdapter
    from agentlightning.adapter.credit import CreditRule as CreditRule
    from agentlightning.adapter.credit import Step as Step
    from agentlightning.adapter.matching import RewardMatchPolicy as RewardMatchPolicy
    from agentlightning.adapter.message import TraceToMessages as TraceToMessages
    from agentlightning.adapter.trajectory import TraceToTrajectories as TraceToTrajectories
    from agentlightning.adapter.trajectory import Trajectories as Trajectories
    from agentlightning.adapter.trajectory import Trajectory as Trajectory
    from agentlightning.adapter.trajectory import build_trajectories as build_trajectories
    from agentlightning.adapter.transition import TraceToTransitions as TraceToTransitions
    from agentlightning.adapter.transition import Transition as Transition
    from agentlightning.adapter.transition import triplets_to_transitions as triplets_to_transitions
    from agentlightning.adapter.triplet import LlmProxyTraceToTriplet as LlmProxyTraceToTriplet
    from agentlightning.adapter.triplet import TracerTraceToTriplet as TracerTraceToTriplet
    from agentlightning.adapter.triplet import TraceToTriplet as TraceToTriplet

__all__ = [
    "Adapter",
    "CreditRule",
    "LlmProxyTraceToTriplet",
    "RewardMatchPolicy",
    "Step",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTrajectories",
    "TraceToTransitions",
    "TraceToTriplet",
    "TracerTraceToTriplet",
    "Trajectories",
    "Trajectory",
    "Transition",
    "build_trajectories",
    "triplets_to_transitions",
]

__getattr__ = resolve_lazily(
    __name__,
    {
        "Adapter": "agentlightning.adapter.adapter",
        "CreditRule": "agentlightning.adapter.credit",
        "LlmProxyTraceToTriplet": "agentlightning.adapter.triplet",
        "RewardMatchPolicy": "agentlightning.adapter.matching",
        "Step": "agentlightning.adapter.credit",
        "TraceAdapter": "agentlightning.adapter.adapter",
        "TraceToMessages": "agentlightning.adapter.message",
        "TraceToTrajectories": "agentlightning.adapter.trajectory",
        "TraceToTransitions": "agentlightning.adapter.transition",
        "TraceToTriplet": "agentlightning.adapter.triplet",
        "TracerTraceToTriplet": "agentlightning.adapter.triplet",
        "Trajectories": "agentlightning.adapter.trajectory",
        "Trajectory": "agentlightning.adapter.trajectory",
        "Transition": "agentlightning.adapter.transition",
        "build_trajectories": "agentlightning.adapter.trajectory",
        "triplets_to_transitions": "agentlightning.adapter.transition",
    },
)
