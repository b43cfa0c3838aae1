"""A model server with scripted answers, for tests, ``agl doctor`` and ``agl replay``."""
