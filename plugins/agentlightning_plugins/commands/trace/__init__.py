"""``agl trace``."""
