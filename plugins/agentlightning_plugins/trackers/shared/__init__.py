"""Shared by trackers."""
