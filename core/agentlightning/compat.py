"""Makes the names of Agent Lightning 0.3 available when it is imported; each use warns with the new name."""

from agentlightning.plugin.registry import get_manager

get_manager().get_target("agentlightning_plugins.legacy.compat:install")()
