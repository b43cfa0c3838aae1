"""``agl runner``."""
