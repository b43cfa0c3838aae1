"""Episodes of environments."""
