"""Shared by tracers."""
