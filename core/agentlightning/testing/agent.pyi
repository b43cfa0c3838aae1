"""Conformance tests for integrations of agent frameworks."""

from agentlightning_plugins.shared.agent_testing.conformance import AgentConformance as AgentConformance
from agentlightning_plugins.shared.agent_testing.conformance import go_on as go_on
from agentlightning_plugins.shared.agent_testing.conformance import is_tool_span as is_tool_span
from agentlightning_plugins.shared.agent_testing.lab import AGENT_NAME as AGENT_NAME
from agentlightning_plugins.shared.agent_testing.lab import INSTRUCTIONS as INSTRUCTIONS
from agentlightning_plugins.shared.agent_testing.lab import MODEL as MODEL
from agentlightning_plugins.shared.agent_testing.lab import TEMPERATURE as TEMPERATURE
from agentlightning_plugins.shared.agent_testing.lab import Lab as Lab
from agentlightning_plugins.shared.agent_testing.lab import add as add
from agentlightning_plugins.shared.agent_testing.lab import answer as answer
from agentlightning_plugins.shared.agent_testing.lab import ask as ask
from agentlightning_plugins.shared.agent_testing.lab import read_sum as read_sum
from agentlightning_plugins.shared.scripted_model.server import Answer as Answer
from agentlightning_plugins.shared.scripted_model.server import ScriptedOpenAI as ScriptedOpenAI
