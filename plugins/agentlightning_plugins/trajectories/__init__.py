"""Library: trajectories of tokens, built from consecutive model calls."""
