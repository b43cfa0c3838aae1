"""Commands for the records of a store: ``agl runs``, ``agl rollouts``, ``agl spans`` and others."""
