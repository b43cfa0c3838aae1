"""Makes the names of Agent Lightning 0.3 available when it is imported; each use warns with the new name."""

from agentlightning_plugins.legacy.compat import install

install()
