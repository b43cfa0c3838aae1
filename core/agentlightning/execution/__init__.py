"""Execution strategies: how an algorithm and its runners share threads, processes or machines."""

from agentlightning.plugin.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
