"""Shared by the integrations of agent frameworks."""
