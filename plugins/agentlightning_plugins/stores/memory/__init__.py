"""The store ``memory://``."""
