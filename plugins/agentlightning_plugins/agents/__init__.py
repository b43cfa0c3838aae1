"""Agents that are no framework's."""
