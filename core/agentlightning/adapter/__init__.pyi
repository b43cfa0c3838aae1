"""Adapters: convert the spans of an attempt to training data."""

from agentlightning.adapter.adapter import TraceAdapter as TraceAdapter
from agentlightning.adapter.triplet import RewardMatchPolicy as RewardMatchPolicy
from agentlightning.adapter.triplet import TracerTraceToTriplet as TracerTraceToTriplet
from agentlightning.adapter.triplet import TraceToTriplet as TraceToTriplet
from agentlightning_plugins.adapters import TraceToTransitions as TraceToTransitions
from agentlightning_plugins.adapters import Transition as Transition
from agentlightning_plugins.adapters import triplets_to_transitions as triplets_to_transitions
from agentlightning_plugins.credit import CreditRule as CreditRule
from agentlightning_plugins.credit import Step as Step
from agentlightning_plugins.gateway.adapter import LlmProxyTraceToTriplet as LlmProxyTraceToTriplet
from agentlightning_plugins.shared.chat_history import TraceToMessages as TraceToMessages
from agentlightning_plugins.shared.trajectories import TraceToTrajectories as TraceToTrajectories
from agentlightning_plugins.shared.trajectories import Trajectories as Trajectories
from agentlightning_plugins.shared.trajectories import Trajectory as Trajectory
from agentlightning_plugins.shared.trajectories import build_trajectories as build_trajectories
