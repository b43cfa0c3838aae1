"""``agl train`` and ``agl config``."""
