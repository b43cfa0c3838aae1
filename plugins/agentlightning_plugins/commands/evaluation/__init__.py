"""``agl eval`` and ``agl compare``."""

from agentlightning_plugins.shared.lazy import lazy_commands

add_commands = lazy_commands(
    "agentlightning_plugins.commands.evaluation.evaluate:command",
    "agentlightning_plugins.commands.evaluation.compare:command",
)
