"""The strategy ``ray``."""
