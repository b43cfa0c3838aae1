"""The algorithm ``evaluation``."""
