"""The algorithm ``baseline``."""
