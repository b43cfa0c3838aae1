"""``agl trace``."""

from agentlightning_plugins.shared.lazy import lazy_commands

add_commands = lazy_commands("agentlightning_plugins.commands.trace.command:command")
