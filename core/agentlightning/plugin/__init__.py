"""The names that authors of plugins import: ``from agentlightning.plugin import Component, hookimpl``.

Names are imported on first use; ``__init__.pyi`` lists them, and docs/plugins/public.md says what each is for.
"""

from agentlightning.plugin.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
