"""Agents: a function, a ``LitAgent`` or a framework's object; every one of them becomes a ``LitAgent`` here."""

from agentlightning.litagent.agent import LitAgent, RewardFunction, check_result
from agentlightning.litagent.framework import FrameworkAgent
from agentlightning.litagent.function import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.wrapping import Prompts, RewardedAgent, initial_prompts, wrap

__all__ = [
    "FrameworkAgent",
    "FunctionalLitAgent",
    "LitAgent",
    "Prompts",
    "RewardFunction",
    "RewardedAgent",
    "check_result",
    "initial_prompts",
    "llm_rollout",
    "prompt_rollout",
    "rollout",
    "wrap",
]
