"""Environments: the agent that plays their episodes, and the kinds that exist elsewhere."""
