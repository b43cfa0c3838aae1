"""``agl replay``."""
