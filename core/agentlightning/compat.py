"""Names of Agent Lightning 0.3, which are available once this module is imported; docs/migration.md lists them."""

from agentlightning.plugin.registry import get_manager

get_manager().get_target("agentlightning_plugins.legacy.compat:install")()
