"""``@algo``: an algorithm from a function."""

from agentlightning.plugin.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
