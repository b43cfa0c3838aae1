"""Lightning improves existing AI agents: ``import agentlightning as agl``.

Names are imported on first use; ``__init__.pyi`` lists the public ones.
"""

from agentlightning.plugin.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
__version__ = "0.1.0"  # the build reads it from here
