"""Lightning makes AI agents that already exist better: ``import agentlightning as agl``.

Nothing is imported before it is used: ``agl.Trainer`` imports the trainer, ``agl.GRPO`` looks it up among the plugins.
The public names are listed in ``__init__.pyi``.
"""

from agentlightning.plugin.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
