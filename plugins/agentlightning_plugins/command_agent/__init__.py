"""``CommandAgent``: a command line, in any language, as an agent."""

from agentlightning_plugins.command_agent.agent import CommandAgent

__all__ = ["CommandAgent"]
