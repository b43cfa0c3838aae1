"""``agl rollouts``, ``agl runs``, ``agl spans``, ``agl resources``, ``agl workers``, ``agl ledger``, ``agl tokens``."""

from agentlightning_plugins.commands.lazy import lazy_commands

add_commands = lazy_commands(
    "agentlightning_plugins.commands.inspect.resources:resources",
    "agentlightning_plugins.commands.inspect.rollouts:rollouts",
    "agentlightning_plugins.commands.inspect.runs:runs",
    "agentlightning_plugins.commands.inspect.spans:spans",
    "agentlightning_plugins.commands.inspect.training:ledger",
    "agentlightning_plugins.commands.inspect.training:tokens",
    "agentlightning_plugins.commands.inspect.workers:workers",
)
