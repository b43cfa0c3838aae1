"""Shared by the plugins of all roots."""
