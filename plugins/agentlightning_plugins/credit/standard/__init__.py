"""The credit rules ``identical``, ``nearest`` and ``discounted``."""
