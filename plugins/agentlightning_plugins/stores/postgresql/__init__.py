"""The store ``postgresql://``."""
