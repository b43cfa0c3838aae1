"""``agl train``: a run from a configuration file."""
