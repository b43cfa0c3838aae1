"""``agl eval`` and ``agl compare``."""
