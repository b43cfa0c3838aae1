"""The store ``sqlite:///path``."""
