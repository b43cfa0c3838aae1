"""Agents: ``wrap`` makes a ``LitAgent`` of a function, a ``LitAgent`` or an object of a framework."""

from agentlightning.litagent.agent import LitAgent as LitAgent
from agentlightning.litagent.agent import RewardFunction as RewardFunction
from agentlightning.litagent.agent import RewardSpec as RewardSpec
from agentlightning.litagent.agent import check_result as check_result
from agentlightning.litagent.agent import read_rating as read_rating
from agentlightning.litagent.agent import running_in as running_in
from agentlightning.litagent.agent import to_spans as to_spans
from agentlightning.litagent.function import FunctionalLitAgent as FunctionalLitAgent
from agentlightning.litagent.function import Prompts as Prompts
from agentlightning.litagent.function import RewardedAgent as RewardedAgent
from agentlightning.litagent.function import llm_rollout as llm_rollout
from agentlightning.litagent.function import prompt_rollout as prompt_rollout
from agentlightning.litagent.function import rollout as rollout
from agentlightning.litagent.function import wrap as wrap
