"""Conformance tests for components of the kind ``policy_backend``: derive from the class, and define its fixture."""

from agentlightning.plugin import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
