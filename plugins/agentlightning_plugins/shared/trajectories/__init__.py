"""Trajectories of tokens, built from consecutive model calls."""
