"""The algorithm ``gepa``."""
