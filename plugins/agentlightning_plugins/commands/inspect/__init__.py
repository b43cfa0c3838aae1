"""``agl rollouts``, ``agl spans``, ``agl resources`` and ``agl workers``."""
