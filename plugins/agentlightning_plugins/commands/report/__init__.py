"""``agl report``."""
