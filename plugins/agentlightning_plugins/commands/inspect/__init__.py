"""``agl rollouts``, ``agl runs``, ``agl spans``, ``agl resources``, ``agl workers``, ``agl ledger``, ``agl tokens``."""

from agentlightning_plugins.shared.lazy import lazy_commands

add_commands = lazy_commands(
    "agentlightning_plugins.commands.inspect.records:resources",
    "agentlightning_plugins.commands.inspect.rollouts:rollouts",
    "agentlightning_plugins.commands.inspect.records:runs",
    "agentlightning_plugins.commands.inspect.records:spans",
    "agentlightning_plugins.commands.inspect.records:ledger",
    "agentlightning_plugins.commands.inspect.records:tokens",
    "agentlightning_plugins.commands.inspect.records:workers",
)
