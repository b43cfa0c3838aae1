"""Agents: ``wrap`` makes a ``LitAgent`` of a function, a ``LitAgent`` or an object of a framework."""

from agentlightning.litagent.agent import LitAgent, RewardFunction, check_result, running_in, to_spans
from agentlightning.litagent.function import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.wrapping import Prompts, RewardedAgent, wrap

__all__ = [
    "FunctionalLitAgent",
    "LitAgent",
    "Prompts",
    "RewardFunction",
    "RewardedAgent",
    "check_result",
    "llm_rollout",
    "prompt_rollout",
    "rollout",
    "running_in",
    "to_spans",
    "wrap",
]
