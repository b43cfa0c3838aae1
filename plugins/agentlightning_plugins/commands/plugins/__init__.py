"""``agl plugins``."""
