"""Rollouts for verl."""
