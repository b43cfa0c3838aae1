"""Searching for better prompts: ``apo`` and ``gepa``, and what a search over rollouts and paid model calls needs."""
