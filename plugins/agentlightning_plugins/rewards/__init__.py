"""Reward functions with settings, one plugin each."""
