"""The name under which ``workspace`` imports ``read_agent_file``."""

from agentlightning_plugins.shared.sandbox.process import read_agent_file as read_agent_file
