"""Shared by integrations."""
