"""Clients of the ``openai`` package."""
