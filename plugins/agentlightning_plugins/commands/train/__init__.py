"""``agl train`` and ``agl config``."""

from agentlightning_plugins.shared.lazy import lazy_commands

add_commands = lazy_commands(
    "agentlightning_plugins.commands.train.command:command",
    "agentlightning_plugins.commands.train.command:config_command",
)
