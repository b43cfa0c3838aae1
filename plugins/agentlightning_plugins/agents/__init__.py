"""Agents that need no framework."""
