"""The strategy ``cs``."""
