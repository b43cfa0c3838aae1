"""Shared by algorithms."""
