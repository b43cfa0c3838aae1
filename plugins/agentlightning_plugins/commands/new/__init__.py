"""``agl new`` and ``agl completion``."""

from agentlightning_plugins.shared.lazy import lazy_commands

add_commands = lazy_commands(
    "agentlightning_plugins.commands.new.command:completion", "agentlightning_plugins.commands.new.command:new"
)
