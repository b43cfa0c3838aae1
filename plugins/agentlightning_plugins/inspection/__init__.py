"""``agl rollouts``, ``spans``, ``resources`` and ``workers``: what is in a store, and what can be done about it."""
